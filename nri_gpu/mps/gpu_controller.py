"""Controls one GPU's MPS daemon: up while containers use it, ended when they are gone or others hold the GPU."""

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
from nri_gpu.system.tasks import Backoff

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0  # a daemon that was up for so long is restarted without a pause


class Demand(StrEnum):
    """What the ledger demands of a GPU's daemon."""

    UP = "up"  # containers use it
    IDLE = "idle"  # nobody holds the GPU
    DOWN = "down"  # containers hold the GPU in another mode


class MpsDependencies(Struct, frozen=True):
    """What is needed of the rest of nri-gpu. tools: raises MpsError where the driver is not staged."""

    tools: Callable[[], MpsTools]
    settings: Callable[[], MpsSettings]
    clock: Callable[[], float] = time.monotonic


class GpuMpsController:
    """Controls one GPU's daemon. fault: why it is not up; empty if nothing is wrong.

    served: a container has started with it. renewed: see `MpsDaemon`.
    """

    def __init__(
        self, folder: DaemonFolder, dependencies: MpsDependencies, renewed: Callable[[], DaemonFolder]
    ) -> None:
        self.demand = Demand.UP
        self.fault = ""
        self.served = False
        self._daemon = MpsDaemon(folder, renewed)
        self._log = logger.bind(gpu_uuid=folder.uuid)
        self._dependencies = dependencies
        self._woken = asyncio.Event()
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._retry_at = 0.0
        self._up_since = 0.0
        self._idle_since: float | None = None

    @property
    def up(self) -> bool:
        """Whether the daemon serves: its process is checked now."""
        return self._daemon.alive

    @property
    def folder(self) -> str:
        """The daemon's folder, or the next one's while none is up."""
        return str(self._daemon.folder.folder)

    def wanted(self, demand: Demand) -> None:
        """Containers came or went. From DOWN to IDLE nothing changes: who was refused meanwhile will come again."""
        if demand is not self.demand and (self.demand, demand) != (Demand.DOWN, Demand.IDLE):
            self.demand = demand
            self._woken.set()

    async def run(self) -> None:
        """Until the daemon is gone for good. When nri-gpu ends, the daemon goes on."""
        adopted = False
        while True:
            if self.demand is not Demand.IDLE:
                self._idle_since = None
            if self._up_since and not self._daemon.alive:
                self._lost()
            try:
                if not adopted:
                    await self._adopt()
                    adopted = True
                if self._used():
                    await self._keep_up()
                elif self._over():
                    self._up_since = 0.0
                    await self._daemon.end(self._dependencies.tools())
                    self._log.info("MPS daemon ended")
                    if not self._used():
                        return
                elif self.served:
                    await self._replace()
            except MpsError as error:
                self._failed(str(error))
            await self._something()

    def _used(self) -> bool:
        return self.demand is Demand.UP

    def _over(self) -> bool:
        if self.demand is Demand.DOWN:
            return True
        now = self._dependencies.clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since >= self._dependencies.settings().linger_s

    async def _adopt(self) -> None:
        if await self._daemon.adopt(self._dependencies.tools(), self._dependencies.settings()):
            self.served = True  # it may have been
            self._started("MPS daemon taken over")

    async def _keep_up(self) -> None:
        if self._daemon.alive:
            return
        self._daemon.prepare()
        if self._dependencies.clock() >= self._retry_at:
            self.served = False
            await self._daemon.start(self._dependencies.tools(), self._dependencies.settings())
            self._started("MPS daemon started")

    async def _replace(self) -> None:
        """All its clients are gone: the next ones get a new daemon, with nothing of theirs."""
        self._up_since = 0.0
        await self._daemon.quit(self._dependencies.tools())
        self.served = False
        if not self._over():
            await self._keep_up()

    def _started(self, phrase: str) -> None:
        self.fault, self._up_since = "", self._dependencies.clock()
        self._log.info(phrase)

    def _lost(self) -> None:
        """It ended by itself, and took its clients' work on the GPU with it."""
        self._daemon.lost()
        self.served = False
        steady = self._dependencies.clock() - self._up_since >= STEADY_S
        self._up_since = 0.0
        self._log.warning("MPS daemon ended by itself")
        if steady:
            self._pauses.reset()
        else:
            self._back_off()

    def _failed(self, sentence: str) -> None:
        if sentence != self.fault:
            self._log.bind(fault=sentence).warning("MPS daemon not up")
        self.fault = sentence
        self._back_off()

    def _back_off(self) -> None:
        self._retry_at = self._dependencies.clock() + self._pauses.next_s()

    async def _something(self) -> None:
        """Wait until there may be something to do."""
        waits = [asyncio.ensure_future(self._woken.wait()), asyncio.ensure_future(self._daemon.ended())]
        try:
            await asyncio.wait(waits, timeout=self._wait_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)
        self._woken.clear()

    def _wait_s(self) -> float | None:
        now = self._dependencies.clock()
        if self.demand is Demand.UP:
            return None if self._daemon.alive else max(self._retry_at - now, 0.0)
        if self._retry_at > now:
            return self._retry_at - now
        since = now if self._idle_since is None else self._idle_since
        return max(since + self._dependencies.settings().linger_s - now, 0.0) if self.demand is Demand.IDLE else 0.0
