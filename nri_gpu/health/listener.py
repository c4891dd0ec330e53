"""What the event process says, from a line of JSON to a value.

A driver's library has written into that process what it liked, so every line is checked: what is not one of these
values through and through is nonsense, and who talks nonsense has lost its mind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.health import GpuEvent
from nri_gpu.inventory.identity import parse_bus_id, parse_uuid
from nri_gpu.system.line_process import LineProcess, ending, python

LINE_MAX: Final = 1 << 16  # bytes; that 247 GPUs cannot be listened to has some 40 000
GPUS_MAX: Final = 247  # as in a report
XID_MAX: Final = 65535
KIND_MAX: Final = 2**64 - 1  # nvmlEventData_t.eventType
INSTANCE_MAX: Final = 2**32 - 2  # nvmlEventData_t.gpuInstanceId; the last one means none
TEXT_MAX: Final = 1000  # characters of a sentence
_CALL: Final = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)


class Call(Struct, frozen=True):
    """It makes this call next."""

    name: str


class Watching(Struct, frozen=True):
    """Who is listened to, by bus id, and who cannot be, with the reason."""

    gpus: tuple[str, ...]
    deaf: Mapping[str, str]


class Unplaced(Struct, frozen=True):
    """An event, and why nobody knows whose."""

    why: str


class Fault(Struct, frozen=True):
    """Waiting failed; its last word."""

    why: str


Said = Call | Watching | Unplaced | Fault | GpuEvent


class NonsenseError(ValueError):
    """A line that says none of these."""


def understood(line: bytes) -> Said:
    """What a line says.

    Raises: NonsenseError.
    """
    if len(line) > LINE_MAX:
        raise NonsenseError("too long")
    try:
        said = json.loads(line)
        (kind,) = _READERS.keys() & said.keys()
        return _READERS[kind](said)
    # KeyError, TypeError, AttributeError: parts that are missing or of another kind. RecursionError: nested too deep.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NonsenseError(type(error).__name__) from error


def _event(said: Mapping[str, Any]) -> GpuEvent:
    event = said["event"]
    return GpuEvent(
        parse_uuid(event["uuid"]),
        _number(event["kind"], KIND_MAX),
        _number(event["xid"], XID_MAX),
        _instance(event.get("gi")),
        _instance(event.get("ci")),
    )


def _watching(said: Mapping[str, Any]) -> Watching:
    gpus, deaf = said["watching"], said["deaf"]
    if not isinstance(gpus, list) or len(gpus) > GPUS_MAX or len(deaf) > GPUS_MAX:
        raise ValueError("not a list of GPUs")
    return Watching(
        tuple(parse_bus_id(each) for each in gpus), {parse_bus_id(each): _text(why) for each, why in deaf.items()}
    )


def _call(said: Mapping[str, Any]) -> Call:
    if not _CALL.fullmatch(said["call"]):
        raise ValueError("not a call")
    return Call(said["call"])


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Said]]] = {
    "call": _call,
    "event": _event,
    "watching": _watching,
    "unplaced": lambda said: Unplaced(_text(said["unplaced"])),
    "fault": lambda said: Fault(_text(said["fault"])),
}


def _number(value: object, most: int) -> int:
    """Raises: ValueError."""
    if type(value) is not int or not 0 <= value <= most:  # a bool is an int to isinstance
        raise ValueError(f"not a number from 0 to {most}")
    return value


def _instance(value: object) -> int | None:
    """Raises: ValueError."""
    return None if value is None else _number(value, INSTANCE_MAX)


def _text(value: object) -> str:
    """One line that a terminal shows as it is. Raises: ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return "".join(letter if letter.isprintable() else "?" for letter in value[:TEXT_MAX])


FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
WAIT: Final = "nvmlEventSetWait_v2"
GONE: Final = "gone"
SAID_MAX: Final = 256
# One that fails after it has listened for so long is not the one that failed before.
STEADY_S: Final = 60.0


class Ear(Struct, frozen=True):
    """Who is told. heard: an event. doubt: waiting failed, or an event has no GPU: time to look at all of them."""

    heard: Callable[[GpuEvent], None]
    doubt: Callable[[], None]


class Hearing(Protocol):
    """Somebody who waits for events of GPUs."""

    def listen(self, bus_ids: frozenset[str]) -> None:
        """To these from now on."""

    async def run(self) -> None:
        """Until cancelled."""


class EventChild:
    """The event process. silence_s: how long it may say nothing while it listens; one call to NVML or one wait."""

    def __init__(
        self,
        driver_root: str | Path,
        library_dirs: Sequence[str],
        ear: Ear,
        *,
        sysfs: str = "/sys",
        silence_s: float = 30.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        paths = ("--driver-root", str(Path(driver_root).absolute()), "--sysfs", str(Path(sysfs).absolute()))
        folders = (f"--library-dir={folder}" for folder in library_dirs)
        self._command = (python(), "-I", "-m", "nri_gpu.health.events", *paths, *folders)
        self._ear = ear
        self._silence_s = silence_s
        self._sleep = sleep
        self._wanted: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._call = ""
        self._listening = False
        self._failures = 0
        self._down = False
        self.attempts = 0  # processes started
        self._process: LineProcess | None = None
        self._leaving: LineProcess | None = None  # told to go, and not yet reaped
        self._said: set[str] = set()  # what is said once

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process else None

    def listen(self, bus_ids: frozenset[str]) -> None:
        """To these from now on; to none ends the process."""
        if bus_ids != self._wanted:
            self._wanted = bus_ids
            self._changed.set()

    async def run(self) -> None:
        """Keep it running while it is wanted; after a failure with a pause that grows."""
        while True:
            while not self._wanted:
                self._changed.clear()
                await self._changed.wait()
            fault = await self._serve()
            if fault:
                self._down = True
                self._once(fault, "not listening for errors of the GPUs; trying again")
                self._ear.doubt()
                pause_s = min(FIRST_PAUSE_S * (1 << min(self._failures, 10)), LONGEST_PAUSE_S)
                self._failures += 1
                await self._sleep(pause_s)

    async def _serve(self) -> str:
        """One process's life. Returns what ended it; empty where nobody is to be listened to any more."""
        if self._leaving and await self._see_off(self._leaving) is None:
            return (
                f"the NVML event process {self._leaving.pid} still hangs in {self._call} and cannot be killed, so no "
                "other is started: see `dmesg | grep NVRM`; the GPU may need a reset, or the node a reboot"
            )
        try:
            self.attempts += 1
            process = self._process = await LineProcess.start(self._command)
        except OSError as error:
            return f"cannot start the NVML event process: {error}"
        self._call, self._listening, fault = "start", True, ""
        loop = asyncio.get_running_loop()
        began = loop.time()
        telling = asyncio.create_task(self._tell(process))
        try:
            fault = await self._hear(process, telling)
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling
            status = await self._see_off(process)  # killed: the kernel closes what it held
        if loop.time() - began >= STEADY_S:
            self._failures = 0
            self._said.clear()
        if fault == GONE:
            words = process.last_line()
            return f"the NVML event process {ending(status)} in {self._call}" + (f": {words}" if words else "")
        return fault

    async def _see_off(self, process: LineProcess) -> int | None:
        """Kills it, or tries again with one that would not go: it stays `_leaving` until it is reaped."""
        self._process = None
        status = await process.end(0)
        self._leaving = process if status is None else None
        return status

    async def _tell(self, process: LineProcess) -> None:
        """Send what is wanted, as it changes; the end is that nothing is."""
        while self._wanted:
            self._changed.clear()
            await process.send(json.dumps({"watch": sorted(self._wanted)}).encode() + b"\n")
            await self._changed.wait()

    async def _hear(self, process: LineProcess, telling: asyncio.Task[None]) -> str:
        while True:
            line = asyncio.ensure_future(process.receive())
            limit_s = self._silence_s if self._listening else None
            done, _ = await asyncio.wait({line, telling}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if line not in done:
                line.cancel()
                await asyncio.gather(line, return_exceptions=True)
                return "" if telling in done else f"{self._call} did not return within {self._silence_s:g} s"
            if not line.result():
                return GONE
            try:
                said = understood(line.result())
            except NonsenseError:
                return f"the NVML event process talked nonsense after {self._call} and was ended"
            if isinstance(said, Fault):
                return said.why
            self._take(said)

    def _take(self, said: Said) -> None:
        """What it says goes to who is told of it."""
        match said:
            case Call(name):
                if name == self._call == WAIT:  # one wait came back, so waiting works
                    self._works()
                self._call = name
            case GpuEvent():
                self._ear.heard(said)
            case Watching(gpus, deaf):
                self._listening = bool(gpus)
                logger.bind(gpus=len(gpus)).debug("listening for errors of gpus")
                for bus_id, why in deaf.items():
                    self._once(f"{bus_id}: {why}", "errors of this gpu are not heard, only seen when it is looked at")
            case Unplaced(why):
                self._once(why, "an event without its gpu; all are looked at")
                self._ear.doubt()

    def _works(self) -> None:
        if self._down:
            logger.bind(attempt=self._failures).info("listening for errors of gpus again")
        self._down = False

    def _once(self, fault: str, phrase: str) -> None:
        if fault not in self._said and len(self._said) < SAID_MAX:
            self._said.add(fault)
            logger.bind(fault=fault).warning(phrase)
