"""All resources of this node, each with its endpoint; new ones as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.kubelet.endpoint import Endpoint, Place
from nri_gpu.kubelet.key import tokens_key
from nri_gpu.kubelet.offers import Offers

TICK_S: Final = 5.0  # for what changes by time alone: grants that lapse, an inventory that grows old


class KubeletRoom:
    """The device plugin. tick: called before each look. keyed: told the tokens' key once it can be had."""

    def __init__(self, offers: Offers, place: Place, tick: Callable[[], None], keyed: Callable[[bytes], None]) -> None:
        self._offers = offers
        self._place = place
        self._tick = tick
        self._keyed = keyed
        self._poked = asyncio.Event()
        self._said = ""
        self._key: bytes | None = None

    def changed(self) -> None:
        """GPUs, grants, the policy or the connection to the runtime."""
        self._poked.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        endpoints: dict[str, Endpoint] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._poked.clear()
                self._tick()
                for resource in self._offers.resources():
                    if resource not in endpoints:
                        endpoints[resource] = Endpoint(resource, self._offers, self._place, self._look_for_key)
                        group.create_task(endpoints[resource].run())
                    endpoints[resource].plugin.changed()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._poked.wait()
                except TimeoutError:
                    continue

    def _look_for_key(self) -> None:
        """At the beginning of each session: the folder may have come, or been made anew."""
        folder = Path(self._place.settings.dir)
        try:
            key = tokens_key(folder, self._key)
        except OSError as error:
            fault = f"key in {folder}: {error.strerror}; it is needed to sign what the kubelet is answered"
            if fault != self._said:
                logger.bind(fault=fault).warning("no device plugin yet")
            self._said = fault
        else:
            if key != self._key:
                self._key = key
                self._keyed(key)
