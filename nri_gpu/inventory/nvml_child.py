"""The daemon's side of the NVML process: it is started, asked within time limits, and replaced when it fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError, fault_of
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.sample import UnitSample, read_units
from nri_gpu.inventory.nvml_report import read_report
from nri_gpu.system.child import LineProcess, announced, ending, python
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.tasks import Backoff, cancelled

REFRESH: Final = b'{"ask": "refresh"}\n'
REFRESH_AND_SAMPLE: Final = b'{"ask": "refresh", "sample": true}\n'
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
# Without a sample, after one that failed: its calls are asked with the next refreshes.
FIRST_WITHOUT_S: Final = 300.0
LONGEST_WITHOUT_S: Final = 3600.0
FAULT_MAX: Final = 1000  # characters of its sentence
SHOWN_MAX: Final = 40  # bytes of a malformed answer
# Calls that may take long on a healthy machine: the interpreter's start, reading the library from a cold disk, and
# the first touch of a GPU that sleeps because persistence mode is off.
_SLOW: Final = frozenset({"start", "dlopen", "nvmlInit", "nvmlDeviceGetHandleByIndex"})


class SampleSink(Struct, frozen=True):
    """The taker of samples. wanted: whether it wants one now. failed: called with the sentence that says why none came.

    taken: called with when NVML was asked, in seconds on the monotonic clock, and what it told.
    """

    wanted: Callable[[], bool]
    taken: Callable[[float, tuple[UnitSample, ...]], Awaitable[None]]
    failed: Callable[[str], None]


class Deadlines(Struct, frozen=True, kw_only=True):
    """The time limits of the NVML process, in seconds."""

    call_s: float = 5.0  # for one NVML call
    slow_call_s: float = 30.0  # for one call that may wake a GPU
    refresh_s: float = 120.0  # for a whole refresh
    sample_s: float = 5.0  # for the sample that follows a refresh
    end_s: float = 0.5  # for the process to exit when asked
    files_s: float = 5.0  # for reading the files of the kernel and the driver


class NvmlChild:
    """The NVML process, started when first needed and again after it failed. It belongs to one event loop."""

    def __init__(
        self,
        driver_root: str,
        library_dirs: Sequence[str] = (),
        *,
        sysfs: str = "/sys",
        stage_dir: str = "",
        deadlines: Deadlines | None = None,
        samples: SampleSink | None = None,
        boot_clock: Callable[[], float] = since_boot_s,
        clock: Callable[[], float] = time.monotonic,  # as `sleep`, for the pause before a new start
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        command = child_command("nri_gpu.inventory.nvml_program", driver_root, library_dirs, sysfs, stage_dir)
        self._process = NvmlProcess("the NVML process", command)
        self._deadlines = deadlines or Deadlines()
        self._samples = samples
        self._sampling: asyncio.Task[None] | None = None  # reads the sample of the last refresh
        self._hangs = Backoff(FIRST_WITHOUT_S, LONGEST_WITHOUT_S)
        self._no_sample_before = 0.0
        self._boot_clock = boot_clock
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._not_before = 0.0
        self._lock = asyncio.Lock()
        self.lacking: tuple[str, ...] = ()  # functions that the library lacked at the last report

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def starts(self) -> int:
        return self._process.starts

    async def refresh(self) -> Inventory:
        """Return NVML's description of the node, without majors.

        Raises: InventoryError, with NVML's own reason, or with the call in which the process hung or died.
        """
        async with self._lock:
            if self._sampling:  # it uses the process, and ends within `sample_s`
                await asyncio.wait({self._sampling})
            await self._pause()
            sink = self._samples if self._clock() >= self._no_sample_before else None
            sink = sink if sink and sink.wanted() else None
            try:
                answer = await self._ask(REFRESH_AND_SAMPLE if sink else REFRESH)
            except InventoryError:
                self._not_before = self._clock() + self._backoff.next_s()
                raise
            self._backoff.reset()
            if sink and "inventory" in answer:
                self._sampling = asyncio.create_task(self._sample(sink))
            if "fault" in answer:
                raise InventoryError(str(answer["fault"])[:FAULT_MAX])
            try:
                report = read_report(answer.get("inventory"), self._boot_clock())
            except InventoryError:
                # The library may have overwritten the process's memory: the next refresh starts another process.
                self._not_before = self._clock() + self._backoff.next_s()
                await self._end()
                raise
            self.lacking = report.lacking
            return report.inventory

    async def close(self) -> None:
        """End the process. A later refresh starts another process."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        await cancelled([self._sampling] if self._sampling else [])
        await self._process.end(self._deadlines.end_s)

    async def _sample(self, sink: SampleSink) -> None:
        """Take the sample that follows an inventory, which is not late by that. What hangs is not asked again soon."""
        began, why = self._clock(), ""
        try:
            async with asyncio.timeout(self._deadlines.sample_s):
                answer = await self._answer()
            units = read_units(answer.get("sample"))
        except TimeoutError:
            why = str(await self._hung(self._deadlines.sample_s, self._process.doing))
        except InventoryError as error:
            why = str(error)
        except ValueError as error:
            why = str(answer.get("fault") or f"the NVML process's sample cannot be read: {error}")[:FAULT_MAX]
        except BaseException:  # cancelled: a late answer must not meet the next request
            self._process.kill()
            raise
        else:
            self._hangs.reset()
            await sink.taken(began, units)
        if why:
            self._no_sample_before = self._clock() + self._hangs.next_s()
            sink.failed(why)

    async def _pause(self) -> None:
        """Wait before a new start, so that a library that crashes at once is not started in a tight loop."""
        if self._backoff.failures:
            await self._sleep(max(0.0, self._not_before - self._clock()))

    async def _ask(self, request: bytes) -> Mapping[str, object]:
        """Return the answer to one request. Raises: InventoryError."""
        try:
            async with asyncio.timeout(self._deadlines.refresh_s):
                answer = await self._converse(request)
                if "stale" in answer:  # another driver was installed, and only a new process can load its library
                    await self._process.end(self._deadlines.end_s)
                    answer = await self._converse(request)
                return answer
        except TimeoutError:
            raise await self._hung(self._deadlines.refresh_s, "a whole refresh") from None
        except BaseException:  # cancelled, perhaps: a late answer must not meet the next request
            self._process.kill()
            raise

    async def _converse(self, request: bytes) -> Mapping[str, object]:
        """Send a request and return its answer. Raises: InventoryError."""
        process = await self._process.start()
        await process.send(request)
        return await self._answer()

    async def _answer(self) -> Mapping[str, object]:
        """Read past the announced calls to the next answer. Raises: InventoryError."""
        process = await self._process.start()
        while True:
            message = await self._receive(process)
            if "call" not in message:
                self._process.call = ""
                return message
            self._process.call = announced(message)

    async def _receive(self, process: LineProcess) -> Mapping[str, object]:
        """Return the next message. Raises: InventoryError."""
        slow = self._process.call.partition(" ")[0] in _SLOW
        limit_s = self._deadlines.slow_call_s if slow else self._deadlines.call_s
        try:
            async with asyncio.timeout(limit_s):
                line = await process.receive()
        except TimeoutError:
            raise await self._hung(limit_s, self._process.doing) from None
        if not line:
            raise InventoryError(await self._process.died(self._deadlines.end_s))
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise await self._malformed(line)
        return message

    async def _hung(self, limit_s: float, doing: str) -> InventoryError:
        """Kill a process that does not answer, and return the error to raise."""
        outcome = "cannot be killed" if await self._process.end(0) is None else "was killed"
        return InventoryError(f"{doing} did not return within {limit_s:g} s; the NVML process {outcome}")

    async def _malformed(self, line: bytes) -> InventoryError:
        """End a process that sent something else than a message, and return the error to raise."""
        await self._process.end(self._deadlines.end_s)
        shown, doing = ascii(line[:SHOWN_MAX].decode(errors="replace")), self._process.doing
        return InventoryError(
            f"the NVML process sent {shown} in {doing}, which is not a message; a new process is started"
        )


class NvmlProcess:
    """At most one process of an NVML program. No other is started while an old one cannot be killed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:  # name: in messages
        self._name = name
        self._command = command
        self._running: LineProcess | None = None
        self.call = ""  # the call that the process announced last
        self.starts = 0  # processes started

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running else None

    @property
    def doing(self) -> str:
        """Return the announced call, for messages."""
        return self.call or "NVML"

    async def start(self) -> LineProcess:
        """Return the process, and start it if none runs. Raises: InventoryError."""
        if self._running is None:
            try:
                self._running = await LineProcess.start(self._command)
            except TimeoutError as error:
                raise InventoryError(f"{self.doing} did not return: {error}") from error
            except OSError as error:
                raise InventoryError(f"cannot start {self._name} {self._command[0]}: {fault_of(error)}") from error
            self.call = "start"
            self.starts += 1
        return self._running

    async def end(self, grace_s: float) -> int | None:
        """End the process. Return its status, or None if there is none, or if it cannot be killed."""
        process, self._running = self._running, None
        return await process.end(grace_s) if process else None

    def kill(self) -> None:
        """Kill the process without waiting."""
        if self._running:
            self._running.kill()
            self._running = None

    async def died(self, grace_s: float) -> str:
        """Reap a process that is gone. Return how it ended, with its last line on stderr."""
        process = self._running
        status = await self.end(grace_s)
        last = process.last_line() if process else ""
        return f"{self._name} {ending(status)} in {self.doing}" + (f": {last}" if last else "")


def child_command(
    module: str, driver_root: str | Path, library_dirs: Sequence[str], sysfs: str, stage_dir: str = ""
) -> tuple[str, ...]:
    """Return the command of one of our NVML programs. It runs in `/`, so its paths are made absolute.

    stage_dir: of staged drivers, or empty.
    """
    given = {"--driver-root": driver_root, "--sysfs": sysfs, **({"--stage-dir": stage_dir} if stage_dir else {})}
    paths = (word for option, path in given.items() for word in (option, str(Path(path).absolute())))
    return (python(), "-I", "-m", module, *paths, *(f"--library-dir={folder}" for folder in library_dirs))
