"""The daemon's side of the NVML process that samples each second: it is started when somebody asks, and ended after."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.sample import SampleTarget, read_units
from nri_gpu.inventory.nvml_child import FAULT_MAX, NvmlProcess, SampleSink, child_command
from nri_gpu.system.child import LineProcess, announced
from nri_gpu.system.tasks import Backoff, due

EACH_S: Final = 1.0
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


async def sleep_until_due(wait_s: float) -> None:
    """Sleep as long, to the second: with other waits of the daemon, each of which would wake it by itself."""
    await asyncio.sleep(due(wait_s) - asyncio.get_running_loop().time())


class SampleChild:
    """The process, which holds NVML open while it runs.

    targets: the GPUs to sample now; none where nobody asks, which ends the process. start_s, sample_s: the time limits
    of the first sample of a process and of the later ones.
    """

    def __init__(
        self,
        driver_root: str | Path,
        library_dirs: Sequence[str],
        targets: Callable[[], Sequence[SampleTarget]],
        sink: SampleSink,
        *,
        sysfs: str = "/sys",
        stage_dir: str = "",
        start_s: float = 30.0,
        sample_s: float = 5.0,
        sleep: Callable[[float], Awaitable[None]] = sleep_until_due,
    ) -> None:
        command = child_command("nri_gpu.usage.nvml_samples", driver_root, library_dirs, sysfs, stage_dir)
        self._process = NvmlProcess("the NVML sampling process", command)
        self._targets = targets
        self._sink = sink
        self._start_s = start_s
        self._sample_s = sample_s
        self._sleep = sleep
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.woken = asyncio.Event()  # set by whoever asks

    @property
    def runs(self) -> bool:
        """Return whether the process runs, and so holds NVML open."""
        return self._process.pid is not None

    @property
    def starts(self) -> int:
        """Return how many processes were started."""
        return self._process.starts

    async def run(self) -> None:
        """Sample while there are targets, until cancelled."""
        try:
            while True:
                await self.woken.wait()
                self.woken.clear()
                while targets := self._targets():
                    await self._sleep(await self._sample(targets))
                await self._process.end(0)  # the kernel closes the device nodes that it had open
        finally:
            await self._process.end(0)

    async def _sample(self, targets: Sequence[SampleTarget]) -> float:
        """Pass on one sample, or why there is none. Return the seconds until the next one."""
        began = time.monotonic()
        try:
            units = read_units((await self._ask(targets)).get("sample"))
        except (InventoryError, ValueError, RecursionError) as error:
            await self._process.end(0)
            self._sink.failed(str(error)[:FAULT_MAX])
            return self._backoff.next_s()
        self._backoff.reset()
        await self._sink.taken(began, units)
        return EACH_S

    async def _ask(self, targets: Sequence[SampleTarget]) -> Mapping[str, object]:
        """Return the answer to one request. Raises: InventoryError; ValueError, if it is none."""
        limit_s = self._sample_s if self.runs else self._start_s
        process = await self._process.start()
        try:
            async with asyncio.timeout(limit_s):
                await process.send(msgspec.json.encode({"sample": targets}) + b"\n")
                return await self._answer(process)
        except TimeoutError:
            outcome = "cannot be killed" if await self._process.end(0) is None else "was killed"
            late = f"{self._process.doing} did not return within {limit_s:g} s"
            raise InventoryError(f"{late}; the NVML sampling process {outcome}") from None

    async def _answer(self, process: LineProcess) -> Mapping[str, object]:
        """Read past a call that takes long to the answer. Raises: InventoryError; ValueError, if it is none."""
        self._process.call = ""
        while True:
            if not (line := await process.receive()):
                raise InventoryError(await self._process.died(0))
            message = json.loads(line)
            if not isinstance(message, dict):
                raise InventoryError("the NVML sampling process sent something else than a message")
            if "fault" in message:
                raise InventoryError(str(message["fault"]))
            if "call" not in message:
                return message
            self._process.call = announced(message)
