"""Reads of the kernel's and the driver's files, which may wait for ever: in a thread of their own, with a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.report import inventory_from_report, lacking_in
from nri_gpu.system.line_process import LineProcess, announced, ending, python

T = TypeVar("T")
Limit = Callable[[float], AbstractAsyncContextManager[object]]  # asyncio.timeout, or a test's own clock


class Aside:
    """At most one thread at a time. One that does not come back is left behind, and not joined by a second.

    A thread of its own and not one of the loop's pool: the loop waits for those when it ends.
    """

    def __init__(self, limit_s: float, limit: Limit = asyncio.timeout) -> None:
        self._limit_s = limit_s
        self._limit = limit
        self._busy = ""

    async def run(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises. what: names it in a sentence.

        Raises: InventoryError, where it takes too long, or one before it still does.
        """
        if self._busy:
            raise InventoryError(f"{self._busy} has still not come to an end: see `dmesg` for tasks that hang")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._busy = what

        def finish(result: T | None, error: BaseException | None) -> None:
            self._busy = ""
            if done.done():  # nobody waits any more
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # there is no error, so it is a T

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=body, name="nri-gpu-aside", daemon=True).start()
        try:
            async with self._limit(self._limit_s):
                return await done
        except TimeoutError:
            raise InventoryError(f"{what} did not come to an end within {self._limit_s:g} s") from None


REFRESH: Final = b'{"ask": "refresh"}\n'
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
FAULT_MAX: Final = 1000  # characters of its sentence
SHOWN_MAX: Final = 40  # bytes of what is no answer
_BUSY: Final = "NVML"
# What may take long on a healthy machine: the interpreter's start, a library read from a cold disk, and the first touch
# of a GPU that sleeps because persistence mode is off.
_SLOW: Final = frozenset({"start", "dlopen", "nvmlInit", "nvmlDeviceGetHandleByIndex"})


class Deadlines(Struct, frozen=True, kw_only=True):
    """How long is waited, seconds.

    call_s: for one NVML call. slow_call_s: for one that may wake a GPU. refresh_s: for a whole refresh.
    end_s: for the process to go when asked. files_s: for what the kernel's and the driver's files tell.
    """

    call_s: float = 5.0
    slow_call_s: float = 30.0
    refresh_s: float = 120.0
    end_s: float = 0.5
    files_s: float = 5.0


class NvmlChild:
    """One NVML process at a time, started when asked for, and again after it was lost.

    Not safe for several loops. wall: seconds since the epoch. clock, sleep: for the pause before a new start.
    limit: the deadlines' clock.
    """

    def __init__(
        self,
        driver_root: str,
        library_dirs: Sequence[str] = (),
        *,
        sysfs: str = "/sys",
        deadlines: Deadlines | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        limit: Limit = asyncio.timeout,
    ) -> None:
        # It runs in `/`, where a relative path would mean something else.
        paths = ("--driver-root", str(Path(driver_root).absolute()), "--sysfs", str(Path(sysfs).absolute()))
        folders = (f"--library-dir={folder}" for folder in library_dirs)
        self._command = (python(), "-I", "-m", "nri_gpu.inventory.nvml", *paths, *folders)
        self._deadlines = deadlines or Deadlines()
        self._wall = wall
        self._clock = clock
        self._sleep = sleep
        self._limit = limit
        self._process: LineProcess | None = None
        self._leaving: LineProcess | None = None  # told to go, and not yet reaped
        self._call = ""  # what it said it would do next
        self._failures = 0
        self._failed_at = 0.0
        self._lock = asyncio.Lock()
        self.lacking: tuple[str, ...] = ()  # functions that the library of the last answer does not have

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process else None

    async def refresh(self) -> Inventory:
        """What NVML says now, majors excepted.

        Raises: InventoryError, with NVML's own reason, or with the call in which the process hung or died.
        """
        async with self._lock:
            await self._pause()
            try:
                said = await self._answer()
            except InventoryError:
                self._failures, self._failed_at = self._failures + 1, self._clock()
                raise
            self._failures = 0
            if "fault" in said:
                raise InventoryError(str(said["fault"])[:FAULT_MAX])
            try:
                return self._read(said.get("inventory"))
            except InventoryError:
                # What reports nonsense has lost its mind, or its memory to the library: another one is asked next.
                self._failures, self._failed_at = 1, self._clock()
                await self._see_off(self._deadlines.end_s)
                raise

    async def close(self) -> None:
        """Ends the process. A later refresh starts another."""
        async with self._lock:
            await self._see_off(self._deadlines.end_s)

    def _read(self, report: object) -> Inventory:
        """Raises: InventoryError."""
        inventory, self.lacking = inventory_from_report(report, self._wall()), lacking_in(report)
        return inventory

    async def _pause(self) -> None:
        """A library that crashes at once is not started in a tight loop, however often somebody asks."""
        if self._failures:
            pause_s = min(FIRST_PAUSE_S * (1 << min(self._failures - 1, 10)), LONGEST_PAUSE_S)
            await self._sleep(max(0.0, self._failed_at + pause_s - self._clock()))

    async def _answer(self) -> Mapping[str, Any]:
        """Raises: InventoryError."""
        answered = False
        try:
            async with self._limit(self._deadlines.refresh_s):
                said = await self._converse()
                if "stale" in said:  # a new driver was installed; it needs a new process, which cannot say this again
                    await self._see_off(self._deadlines.end_s)
                    said = await self._converse()
            answered = True
        except TimeoutError:
            raise await self._hung(self._deadlines.refresh_s, "a whole refresh") from None
        finally:
            if not answered and self._process:  # cancelled: what it would still say is no answer to the next question
                self._process.kill()
                self._leaving, self._process = self._process, None
        return said

    async def _converse(self) -> Mapping[str, Any]:
        """The line that ends a refresh, past all those that announce a call. Raises: InventoryError."""
        process = await self._running()
        await process.send(REFRESH)
        while True:
            said = await self._hear(process)
            if "call" not in said:
                self._call = ""
                return said
            self._call = announced(said)

    async def _running(self) -> LineProcess:
        """Raises: InventoryError."""
        if self._process is None:
            await self._see_off(0)
            if self._leaving:
                raise InventoryError(
                    f"process {self._leaving.pid} still hangs in {self._call or _BUSY} and cannot be killed, so no "
                    "other is started: see `dmesg | grep NVRM`; the GPU may need a reset, or the node a reboot"
                )
            self._call = "start"
            try:
                self._process = await LineProcess.start(self._command)
            except OSError as error:
                raise InventoryError(f"cannot start the NVML process {self._command[0]}: {error}") from error
        return self._process

    async def _hear(self, process: LineProcess) -> Mapping[str, Any]:
        """Raises: InventoryError."""
        slow = self._call.partition(" ")[0] in _SLOW
        limit_s = self._deadlines.slow_call_s if slow else self._deadlines.call_s
        try:
            async with self._limit(limit_s):
                line = await process.receive()
        except TimeoutError:
            raise await self._hung(limit_s, self._call or _BUSY) from None
        if not line:
            raise await self._died()
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise await self._mad(line)
        return said

    async def _hung(self, limit_s: float, doing: str) -> InventoryError:
        """Kills what does not answer."""
        await self._see_off(0)
        fate = "cannot be killed" if self._leaving else "was killed"
        return InventoryError(f"{doing} did not return within {limit_s:g} s; the NVML process {fate}")

    async def _mad(self, line: bytes) -> InventoryError:
        """Sees off one that does not speak our language."""
        doing = self._call or _BUSY
        await self._see_off(self._deadlines.end_s)
        shown = ascii(line[:SHOWN_MAX].decode(errors="replace"))
        return InventoryError(f"the NVML process said {shown} in {doing}, which is no answer; another is started")

    async def _died(self) -> InventoryError:
        """Sees off one that is gone."""
        process, doing = self._process, self._call or _BUSY
        status = await self._see_off(self._deadlines.end_s)
        words = process.last_line() if process else ""
        return InventoryError(f"the NVML process {ending(status)} in {doing}" + (f": {words}" if words else ""))

    async def _see_off(self, grace_s: float) -> int | None:
        """Ends the process, or tries again with one that would not go; it stays `_leaving` until it is reaped."""
        if self._process:
            self._leaving, self._process = self._process, None
        if self._leaving is None:
            return None
        status = await self._leaving.end(grace_s)
        if status is not None:
            self._leaving = None
        return status
