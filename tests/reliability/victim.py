"""A daemon or guard that is attacked, and what must hold of it after each attack."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Final, TypeVar

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from tests.support import nri_messages as nri
from tests.support.daemon import NriGpu
from tests.support.errors import HarnessError
from tests.support.scripted_runtime import Listener, ScriptedRuntime

T = TypeVar("T")

GPUS: Final = 4
CONNECTS_S: Final = 45.0  # two connections in a row that ended inside Synchronize are followed by a pause of 5 to 30 s
ANSWERS_S: Final = 2.0  # the runtime's own timeout
FREE_S: Final = 10.0  # until what an attack was granted, and no runtime lists, is free again
RSS_GROWTH_MIB: Final = 96
DESCRIPTORS_GROWTH: Final = 2


class Victim:
    """A daemon or guard, and the runtime's socket that it connects to."""

    def __init__(self, process: NriGpu, listener: Listener, *, grants: bool) -> None:
        self.process = process
        self.listener = listener
        self.grants = grants
        self.slowest_s = 0.0
        self.rss_mib, self.descriptors = 0.0, 0

    async def connected(self) -> ScriptedRuntime:
        """Through a whole registration. Raises: HarnessError: it does not come."""
        until = time.monotonic() + CONNECTS_S
        while True:  # an attack may leave connections behind that were made and ended meanwhile
            runtime = await self.listener.accept(until - time.monotonic())
            try:
                await runtime.handshake()
            except (HarnessError, OSError):
                runtime.close()
                if time.monotonic() > until:
                    raise
            else:
                return runtime

    async def recover(self) -> None:
        """All that must hold after an attack. Raises: HarnessError."""
        began = time.monotonic()
        runtime = await self.connected()
        try:
            await self.serves(runtime)
        finally:
            runtime.close()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    async def serves(self, runtime: ScriptedRuntime) -> None:
        """A proper request on this connection is answered in time; no GPU is held after it. Raises: HarnessError."""
        await (self._granted(runtime) if self.grants else self._refused(runtime))

    async def _granted(self, runtime: ScriptedRuntime) -> None:
        pod = nri.asking(str(GPUS), "proper")
        made = nri.container(pod)
        until = time.monotonic() + FREE_S
        while True:
            reply = await _within(runtime.create(pod, made))
            if isinstance(reply, pb.CreateContainerResponse):
                break
            if time.monotonic() > until:
                raise HarnessError(f"a proper request is answered {reply.message}")
            await asyncio.sleep(0.05)
        nodes = {each.path for each in reply.adjust.linux.devices}
        if not nodes >= {f"/dev/nvidia{number}" for number in range(GPUS)}:
            raise HarnessError(f"a container was granted {sorted(nodes)}")
        for kind in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
            await _within(runtime.event(kind, pod, made))

    async def _refused(self, runtime: ScriptedRuntime) -> None:
        """The guard: what asked and was granted nothing does not start."""
        pod = nri.asking("1", "proper")
        if (await _within(runtime.event(Event.START_CONTAINER, pod, nri.container(pod)))).ok:
            raise HarnessError("the guard let a container start without a grant")

    def measure(self) -> None:
        """Its memory and descriptors, as they are."""
        proc = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        self.rss_mib = int(status["VmRSS"].split()[0]) / 1024
        self.descriptors = len(list((proc / "fd").iterdir()))

    def check(self, rss_mib: float, descriptors: int) -> None:
        """Raises: HarnessError: it kept more than these were before."""
        self.measure()
        if self.rss_mib - rss_mib > RSS_GROWTH_MIB or self.descriptors - descriptors > DESCRIPTORS_GROWTH:
            grown = f"{self.rss_mib - rss_mib:+.0f} MiB, {self.descriptors - descriptors:+} descriptors"
            raise HarnessError(f"it kept {grown}")


async def _within(answer: Awaitable[T]) -> T:
    began = time.monotonic()
    found = await answer
    if (took_s := time.monotonic() - began) > ANSWERS_S:
        raise HarnessError(f"a proper request was answered after {took_s:.1f} s")
    return found
