"""The listener for NVML's events: it runs the event process, checks what it sends, and passes the events on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

from loguru import logger
from msgspec import Meta, MsgspecError, Struct
from msgspec.json import Decoder

from nri_gpu.domain import bounds
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import GpuEvent
from nri_gpu.domain.text import printable
from nri_gpu.inventory.nvml_child import NvmlProcess, child_command
from nri_gpu.system.child import LineProcess
from nri_gpu.system.tasks import Backoff, LogOnce, cancelled

LINE_MAX: Final = 1 << 16  # bytes; a line that no GPU of 247 can be watched has some 40 000
KIND_MAX: Final = 2**64 - 1  # nvmlEventData_t.eventType, and eventData
TEXT_MAX: Final = 1000  # characters of a sentence
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
WAIT: Final = "nvmlEventSetWait_v2"
LOGGED_MAX: Final = 256
# A process that listened for so long has worked: the pauses after it start again with the first.
STEADY_S: Final = 60.0

BusId = Annotated[str, bounds.BUS_ID.meta()]
Text = Annotated[str, Meta(min_length=1)]
Instance = Annotated[int, Meta(ge=0, le=2**32 - 2)] | None  # nvmlEventData_t.gpuInstanceId; 2**32 - 1 means none


class NextCall(Struct, tag="call"):
    """The call that the process makes next."""

    call: Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9_]{0,63}\Z")]


class Watching(Struct, tag="watching"):
    """The GPUs that are watched, by bus id, and those that cannot be, with the reason."""

    gpus: Annotated[tuple[BusId, ...], Meta(max_length=bounds.GPU_INDEX_MAX)]
    failed: Annotated[dict[BusId, Text], Meta(max_length=bounds.GPU_INDEX_MAX)]


class EventReport(Struct, tag="event"):
    """An event. gi, ci: ids of the MIG device that it concerns; None for the whole GPU."""

    uuid: Annotated[str, bounds.UUID.meta()]
    kind: Annotated[int, Meta(ge=0)]
    xid: Annotated[int, Meta(ge=0)]
    gi: Instance = None
    ci: Instance = None

    def __post_init__(self) -> None:
        if max(self.kind, self.xid) > KIND_MAX:  # Meta has no bounds beyond 63 bits
            raise ValueError("no kind of event")

    @property
    def event(self) -> GpuEvent:
        return GpuEvent(self.uuid, self.kind, self.xid, self.gi, self.ci)


class _Explained(Struct):
    why: Text

    def __post_init__(self) -> None:
        self.why = _printable(self.why)


class UnplacedEvent(_Explained, tag="unplaced"):
    """An event whose GPU is unknown, and why."""


class WaitingFailed(_Explained, tag="fault"):
    """The last line of a process whose waiting failed."""


EventLine = NextCall | Watching | EventReport | UnplacedEvent | WaitingFailed
_DECODER: Final = Decoder(EventLine)


class MalformedLineError(ValueError):
    """A line that the event process never sends."""


def parse_line(line: bytes) -> EventLine:
    """Read a line. A driver's library could have overwritten the process's memory, so every part is checked.

    Raises: MalformedLineError.
    """
    if len(line) > LINE_MAX:
        raise MalformedLineError("too long")
    try:
        parsed: EventLine = _DECODER.decode(line)
    except (ValueError, MsgspecError, RecursionError) as error:
        raise MalformedLineError(type(error).__name__) from error
    return parsed


def _printable(text: str) -> str:
    """Return one line that a terminal shows as it is."""
    return printable(text[:TEXT_MAX])


class EventSink(Struct, frozen=True):
    """The takers of events. event: called with each.

    doubt: called when events may be missing, or an event has no GPU.
    """

    event: Callable[[GpuEvent], None]
    doubt: Callable[[], None]


class EventChild:
    """The event process. silence_s: how long it may send nothing while it listens: for one NVML call or one wait."""

    def __init__(
        self,
        driver_root: str | Path,
        library_dirs: Sequence[str],
        sink: EventSink,
        *,
        sysfs: str = "/sys",
        stage_dir: str = "",
        silence_s: float = 30.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        command = child_command("nri_gpu.health.nvml_events", driver_root, library_dirs, sysfs, stage_dir)
        self._process = NvmlProcess("the NVML event process", command)
        self._sink = sink
        self._silence_s = silence_s
        self._sleep = sleep
        self._wanted: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._listening = False
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._down = False
        self._logged: set[str] = set()
        self._faults = LogOnce()

    @property
    def starts(self) -> int:
        """Return how many processes were started."""
        return self._process.starts

    def listen(self, bus_ids: frozenset[str]) -> None:
        """Listen to these GPUs from now on; an empty set ends the process."""
        if bus_ids != self._wanted:
            self._wanted = bus_ids
            self._changed.set()

    async def run(self) -> None:
        """Keep the process running while there are GPUs to listen to."""
        while True:
            while not self._wanted:
                self._changed.clear()
                await self._changed.wait()
            fault = await self._serve()
            if fault:
                self._down = True
                self._faults.warning("not listening for GPU errors, trying again", fault)
                self._sink.doubt()
                await self._sleep(self._backoff.next_s())

    async def _serve(self) -> str:
        """Run one process. Return why it ended, or empty if there is no GPU to listen to any more."""
        try:
            process = await self._process.start()
        except InventoryError as error:
            return str(error)
        self._listening = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        requests = asyncio.create_task(self._send_requests(process))
        try:
            fault = await self._receive(process, requests)
        finally:
            await cancelled([requests])
            await self._process.end(0)  # the kernel closes the device nodes that it had open
        if loop.time() - began >= STEADY_S:
            self._backoff.reset()
            self._logged.clear()
            self._faults.clear()
        return fault

    async def _send_requests(self, process: LineProcess) -> None:
        """Tell the process which GPUs to watch, as that changes. Return once there is none."""
        while self._wanted:
            self._changed.clear()
            await process.send(json.dumps({"watch": sorted(self._wanted)}).encode() + b"\n")
            await self._changed.wait()

    async def _receive(self, process: LineProcess, requests: asyncio.Task[None]) -> str:
        """Take lines until the process fails, or `requests` is done. Return why it failed, or empty."""
        while True:
            line = asyncio.ensure_future(process.receive())
            limit_s = self._silence_s if self._listening else None
            done, _ = await asyncio.wait({line, requests}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if line not in done:
                line.cancel()
                await asyncio.gather(line, return_exceptions=True)
                return "" if requests in done else f"{self._process.call} did not return within {self._silence_s:g} s"
            if not line.result():
                return await self._process.died(0)
            try:
                parsed = parse_line(line.result())
            except MalformedLineError:
                return f"the NVML event process sent a malformed line after {self._process.call} and was ended"
            if isinstance(parsed, WaitingFailed):
                return parsed.why
            self._take(parsed)

    def _take(self, line: EventLine) -> None:
        match line:
            case NextCall(name):
                if name == self._process.call == WAIT:  # one wait returned, so waiting works
                    self._works()
                self._process.call = name
            case EventReport():
                self._sink.event(line.event)
            case Watching(gpus, failed):
                self._listening = bool(gpus)
                logger.bind(gpus=len(gpus)).debug("listening for GPU errors")
                for bus_id, why in failed.items():
                    self._warn_once(f"{bus_id}: {_printable(why)}", "cannot listen for errors of this GPU")
            case UnplacedEvent(why):
                self._warn_once(why, "event names no GPU: refreshing all GPUs")
                self._sink.doubt()

    def _works(self) -> None:
        if self._down:
            logger.bind(attempt=self._backoff.failures).info("listening for GPU errors again")
        self._down = False

    def _warn_once(self, fault: str, phrase: str) -> None:
        if fault not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(fault)
            logger.bind(fault=fault).warning(phrase)
