"""All resources of this node, each with its endpoint; new ones as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from nri_gpu.domain.kubelet import Standing
from nri_gpu.kubelet.endpoint import Endpoint, Place
from nri_gpu.kubelet.offers import Offers
from nri_gpu.log import logger

TICK_S: Final = 5.0  # for what changes by time alone: grants that lapse, an inventory that grows old


class KubeletRoom:
    """The device plugin. tick: called before each look. began: at the beginning of each session of each resource."""

    def __init__(self, offers: Offers, place: Place, tick: Callable[[], None], began: Callable[[], None]) -> None:
        self._offers = offers
        self._place = place
        self._tick = tick
        self._began = began
        self._poked = asyncio.Event()
        self._bug = ""
        self._leaving = False
        self._endpoints: dict[str, Endpoint] = {}

    def changed(self) -> None:
        """GPUs, grants, the policy or the connection to the runtime."""
        self._poked.set()

    def standings(self) -> tuple[Standing, ...]:
        """How each resource stands with the kubelet."""
        return tuple(endpoint.standing() for endpoint in self._endpoints.values())

    def watched(self) -> bool:
        """Whether the kubelet reads the list of every resource."""
        endpoints = self._endpoints.values()
        return bool(endpoints) and all(each.plugin.watched.is_set() for each in endpoints)

    def leave(self) -> None:
        """Serve on, and register no more."""
        self._leaving = True
        for endpoint in self._endpoints.values():
            endpoint.leaving = True

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ExceptionGroup: of RestartNeededError alone.

        """
        async with asyncio.TaskGroup() as group:
            while True:
                self._poked.clear()
                try:
                    self._look(group)
                except Exception as error:  # the other half serves on, whatever this one meets
                    if repr(error) != self._bug:
                        logger.opt(exception=True).error("device plugin not up to date, by a bug of ours")
                    self._bug = repr(error)
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._poked.wait()
                except TimeoutError:
                    continue

    def _look(self, group: asyncio.TaskGroup) -> None:
        self._tick()
        for resource in () if self._leaving else self._offers.resources():
            if resource not in self._endpoints:
                self._endpoints[resource] = Endpoint(resource, self._offers, self._place, self._began)
                group.create_task(self._endpoints[resource].run())
            self._endpoints[resource].plugin.changed()
        self._bug = ""
