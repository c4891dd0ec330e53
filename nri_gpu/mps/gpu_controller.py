"""Looks after one GPU's daemon: has it up while containers use it, and gone when they left or others have the GPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.mps.daemon import MpsDaemon, MpsError, MpsTools
from nri_gpu.mps.folders import DaemonFolder
from nri_gpu.policy.mps import MpsSettings

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0  # up for so long, a daemon that ends is started again without a pause


class Demand(StrEnum):
    """What containers want of a GPU's daemon now."""

    UP = "up"  # somebody uses it
    IDLE = "idle"  # nobody does, and nobody has the GPU in another mode
    DOWN = "down"  # somebody has the GPU in another mode


class MpsDependencies(Struct, frozen=True):
    """What a tender needs of the daemon that we are. MpsTools may raise MpsError."""

    tools: Callable[[], MpsTools]
    settings: Callable[[], MpsSettings]
    clock: Callable[[], float] = time.monotonic


class GpuMpsController:
    """One GPU's. fault: why its daemon is not up; empty while nothing is known against it.

    served: a container was let start with it. renewed: as for `MpsDaemon`.
    """

    def __init__(self, place: DaemonFolder, around: MpsDependencies, renewed: Callable[[], DaemonFolder]) -> None:
        self.wish = Demand.UP
        self.fault = ""
        self.served = False
        self._daemon = MpsDaemon(place, renewed)
        self._log = logger.bind(gpu_uuid=place.uuid)
        self._around = around
        self._poked = asyncio.Event()
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = 0.0
        self._up_since = 0.0
        self._idle_since: float | None = None

    @property
    def up(self) -> bool:
        """Whether the daemon serves, by what the kernel says of its process at this moment."""
        return self._daemon.alive

    @property
    def folder(self) -> str:
        """The daemon's, or that of the next one where none is up."""
        return str(self._daemon.place.folder)

    def wanted(self, wish: Demand) -> None:
        """Containers came or went. One that wanted the GPU otherwise and was refused meanwhile will come again."""
        if wish is not self.wish and (self.wish, wish) != (Demand.DOWN, Demand.IDLE):
            self.wish = wish
            self._poked.set()

    async def run(self) -> None:
        """Until the daemon is gone for good; our own end leaves it running."""
        adopted = False
        while True:
            if self.wish is not Demand.IDLE:
                self._idle_since = None
            if self._up_since and not self._daemon.alive:
                self._lost()
            try:
                if not adopted:
                    await self._adopt()
                    adopted = True
                if self._used():
                    await self._hold_up()
                elif self._over():
                    self._up_since = 0.0
                    await self._daemon.end(self._around.tools())
                    self._log.info("MPS daemon ended")
                    if not self._used():
                        return
                elif self.served:
                    await self._replace()
            except MpsError as error:
                self._failed(str(error))
            await self._something()

    def _used(self) -> bool:
        return self.wish is Demand.UP

    def _over(self) -> bool:
        if self.wish is Demand.DOWN:
            return True
        now = self._around.clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since >= self._around.settings().linger_s

    async def _adopt(self) -> None:
        if await self._daemon.adopt(self._around.tools(), self._around.settings()):
            self.served = True  # for all that is known
            self._started("MPS daemon taken over")

    async def _hold_up(self) -> None:
        if self._daemon.alive:
            return
        self._daemon.prepare()
        if self._around.clock() >= self._retry_at:
            self.served = False
            await self._daemon.start(self._around.tools(), self._around.settings())
            self._started("MPS daemon started")

    async def _replace(self) -> None:
        """All its clients left: whoever comes next finds nothing of theirs."""
        self._up_since = 0.0
        await self._daemon.quit(self._around.tools())
        self.served = False
        if not self._over():
            await self._hold_up()

    def _started(self, phrase: str) -> None:
        self.fault, self._up_since = "", self._around.clock()
        self._log.info(phrase)

    def _lost(self) -> None:
        """It ended by itself, and with it what its clients had on the GPU."""
        self._daemon.lost()
        self.served = False
        steady = self._around.clock() - self._up_since >= STEADY_S
        self._up_since = 0.0
        self._log.warning("MPS daemon ended by itself")
        if steady:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._back_off()

    def _failed(self, sentence: str) -> None:
        if sentence != self.fault:
            self._log.bind(fault=sentence).warning("MPS daemon not served")
        self.fault = sentence
        self._back_off()

    def _back_off(self) -> None:
        self._retry_at = self._around.clock() + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    async def _something(self) -> None:
        """Until there may be something to do."""
        waits = [asyncio.ensure_future(self._poked.wait()), asyncio.ensure_future(self._daemon.ended())]
        try:
            await asyncio.wait(waits, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)
        self._poked.clear()

    def _patience_s(self) -> float | None:
        now = self._around.clock()
        if self.wish is Demand.UP:
            return None if self._daemon.alive else max(self._retry_at - now, 0.0)
        if self._retry_at > now:
            return self._retry_at - now
        since = now if self._idle_since is None else self._idle_since
        return max(since + self._around.settings().linger_s - now, 0.0) if self.wish is Demand.IDLE else 0.0
