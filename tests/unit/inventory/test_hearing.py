"""The process that waits for NVML's events, through the real binding and a made-up library."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health import listener as module
from nri_gpu.health.listener import EventChild, EventReport, EventSink, MalformedLineError, WaitingFailed, parse_line
from nri_gpu.system.line_process import LineProcess
from tests.support.log import Line, hearing
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence, happen

GPUS = tuple(FakeGpu(uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
BUS_IDS = tuple(f"0000:{0x10 + n:02x}:00.0" for n in range(3))
PATIENCE_S = 20.0


class Station:
    """A listener under test, and what it told."""

    def __init__(self, root: Path, silence_s: float = 15.0) -> None:
        self.events: list[GpuEvent] = []
        self.doubts = 0
        self.lines: list[str] = []
        self.news = asyncio.Event()
        ear = EventSink(self._heard, self._doubt)
        self.child = EventChild(root, (), ear, silence_s=silence_s, sleep=self._sleep)
        self.pauses: list[float] = []

    def _heard(self, event: GpuEvent) -> None:
        self.events.append(event)
        self.news.set()

    def _doubt(self) -> None:
        self.doubts += 1
        self.news.set()

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def until(self, fact: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not fact():
                self.news.clear()
                await self.news.wait()

    def says(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@asynccontextmanager
async def listening(root: Path, *gpus: int, silence_s: float = 15.0) -> AsyncIterator[Station]:
    station = Station(root, silence_s)

    def note(line: Line) -> None:
        station.lines.append(str(line))
        station.news.set()

    with hearing(note, "DEBUG"):
        station.child.listen(frozenset(BUS_IDS[gpu] for gpu in gpus))
        task = asyncio.create_task(station.child.run())
        try:
            yield station
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def xid(gpu: int, number: int) -> GpuEvent:
    return GpuEvent(GPUS[gpu].uuid, int(EventType.XID), number)


def test_events_of_the_gpus_that_are_listened_to(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        happen(root, 1, EventType.XID, 13)  # before anybody listened
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            happen(root, 2, EventType.XID, 48)
            happen(root, 1, EventType.XID, 79)
            happen(root, 0, EventType.DOUBLE_BIT_ECC)
            await station.until(lambda: len(station.events) == 2)
            assert station.events == [xid(1, 79), GpuEvent(GPUS[0].uuid, int(EventType.DOUBLE_BIT_ECC))]
            assert station.doubts == 0

    asyncio.run(run())


def test_more_gpus_later_and_none_in_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 0) as station:
            await station.until(lambda: station.says("'gpus': 1"))
            station.child.listen(frozenset(BUS_IDS))
            await station.until(lambda: station.says("'gpus': 3"))
            happen(root, 2, EventType.XID, 48)
            await station.until(lambda: station.events)
            # One fewer: NVML has to be left, which is what lets go of a node.
            station.child.listen(frozenset(BUS_IDS[:1]))
            await station.until(lambda: station.says("'gpus': 1") == 2)
            calls = (root / "usr").rglob("fake-nvml.calls")
            assert next(calls).read_text().splitlines().count("nvmlShutdown") == 1
            station.child.listen(frozenset())
            happen(root, 0, EventType.XID, 79)
            await asyncio.sleep(0)
            assert station.events == [xid(2, 48)]

    asyncio.run(run())


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"]
)
@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_gpu_that_cannot_be_registered_costs_itself_alone(tmp_path: Path, function: str, code: int) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS, [Act(function, "fail", code, gpu=1)])
        async with listening(root, 0, 1, 2) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            assert station.says("cannot listen for errors of this gpu") == 1
            happen(root, 2, EventType.XID, 79)
            await station.until(lambda: station.events)
            assert (station.events, station.doubts) == ([xid(2, 79)], 0)

    asyncio.run(run())


def test_an_event_without_a_gpu_is_said_once_and_blames_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.says("'gpus': 2"))
            happen(root, -1, EventType.XID, 79)
            happen(root, -1, EventType.XID, 79)
            happen(root, 1, EventType.XID, 31)
            await station.until(lambda: station.events)
            assert (station.events, station.doubts) == ([xid(1, 31)], 2)
            assert station.says("event without its gpu") == 1

    asyncio.run(run())


def test_a_lost_gpu_is_known_by_its_handle(tmp_path: Path) -> None:
    """Its UUID was asked for once; afterwards NVML may not tell it any more."""

    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS)
        async with listening(root, 1) as station:
            await station.until(lambda: station.says("'gpus': 1"))
            asked = next((root / "usr").rglob("fake-nvml.calls"))
            before = asked.read_text().splitlines().count("nvmlDeviceGetUUID")
            happen(root, 1, EventType.XID, 79)
            await station.until(lambda: station.events)
            assert asked.read_text().splitlines().count("nvmlDeviceGetUUID") == before

    asyncio.run(run())


@pytest.mark.parametrize("code", [1, 2, 15, 16, 17, 999])
def test_waiting_that_fails_blames_nobody_and_is_tried_again(tmp_path: Path, code: int) -> None:
    async def run() -> None:
        root = build_fake_nvml(tmp_path, GPUS, [Act("nvmlEventSetWait_v2", "fail", code)])
        async with listening(root, 0, 1) as station:
            await station.until(lambda: station.doubts >= 2)
            assert station.events == []
            assert station.says("not listening for errors") == 1, "once for the same reason"
            configure(root, GPUS)
            await station.until(lambda: station.says("listening for errors of gpus again"))
            assert station.pauses == sorted(station.pauses)
            happen(root, 1, EventType.XID, 79)
            await station.until(lambda: station.events)

    asyncio.run(run())


def test_pauses_grow_while_it_fails_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with listening(tmp_path, 0) as station:  # no library there
            await station.until(lambda: len(station.pauses) >= 3)
            assert station.pauses[:3] == [0.1, 0.2, 0.4]
            assert station.says("was not found below the driver root") == 1

    asyncio.run(run())


@pytest.mark.parametrize("deed", ["hang", "crash"])
def test_a_driver_that_hangs_or_crashes_takes_only_the_process_along(tmp_path: Path, deed: str) -> None:
    async def run() -> None:
        assert deed in ("hang", "crash")
        act = Act("nvmlEventSetWait_v2", "hang" if deed == "hang" else "crash")
        root = build_fake_nvml(tmp_path, GPUS, [act])
        async with listening(root, 0, silence_s=3.0) as station:
            await station.until(lambda: station.doubts)
            assert station.says("nvmlEventSetWait_v2") >= 1

    asyncio.run(run())


async def test_the_library_sees_an_empty_environment_and_no_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the process that looks (test_nvml.py)."""
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
    root = build_fake_nvml(tmp_path, GPUS)
    async with listening(root, 0) as station:
        await station.until(lambda: station.says("'gpus': 1"))
        assert evidence(root, "environ") == ""
        status = dict(line.split(":\t", 1) for line in evidence(root, "status").splitlines())
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"


# --- what does not speak our language ---------------------------------------------------------------------------------

EVENT = {"type": "event", "uuid": GPUS[0].uuid, "kind": 8, "xid": 79, "gi": None, "ci": None}
GARBAGE = {
    "no JSON": b"not json",
    "no UTF-8": b"\xff\xfe",
    "nested too deep": b"[" * 60_000,
    "too long": b'{"type": "unplaced", "why": "' + b"a" * 70_000 + b'"}',
    "a number too long to read": b'{"type": "event", "kind": ' + b"9" * 5000 + b"}",
    "null": b"null",
    "a list": b"[1]",
    "nothing we know": b"{}",
    "a type that we do not know": b'{"type": "word", "call": "nvmlInit"}',
    "a type that is none": b'{"type": 3}',
    "an event that is none": b'{"type": "event"}',
    "an event without a kind": json.dumps({"type": "event", "uuid": GPUS[0].uuid, "xid": 79}).encode(),
    "a number that is a text": json.dumps(EVENT | {"xid": "79"}).encode(),
    "a number that is a truth": json.dumps(EVENT | {"xid": True}).encode(),
    "a number out of all bounds": json.dumps(EVENT | {"xid": 1 << 70}).encode(),
    "one below them": json.dumps(EVENT | {"kind": -1}).encode(),
    "a part of a number": json.dumps(EVENT | {"gi": 0.5}).encode(),
    "a UUID that colours": json.dumps(EVENT | {"uuid": "\x1b[31mGPU"}).encode(),
    "a UUID with a tail": json.dumps(EVENT | {"uuid": GPUS[0].uuid + "\n"}).encode(),
    "a UUID that is none": json.dumps(EVENT | {"uuid": 7}).encode(),
    "the deaf as a list": b'{"type": "watching", "gpus": [], "failed": []}',
    "the deaf without names": b'{"type": "watching", "gpus": [], "failed": {"": "why"}}',
    "the deaf without reasons": b'{"type": "watching", "gpus": [], "failed": {"0000:10:00.0": 3}}',
    "watching a number": b'{"type": "watching", "gpus": 3, "failed": {}}',
    "watching nobody's address": b'{"type": "watching", "gpus": ["../.."], "failed": {}}',
    "a call of no name": b'{"type": "call", "call": ""}',
    "a call that breaks the line": b'{"type": "call", "call": "nvmlInit\\ninjected"}',
    "a fault of a list": b'{"type": "fault", "why": ["a"]}',
    "an empty fault": b'{"type": "fault", "why": ""}',
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
def test_nonsense_is_told_from_sense(line: bytes) -> None:
    with pytest.raises(MalformedLineError):
        parse_line(line)


def test_what_a_terminal_would_act_on_is_shown_as_marks() -> None:
    assert parse_line(b'{"type": "fault", "why": "\\u001b[31mred\\nnext"}') == WaitingFailed("?[31mred?next")


def test_an_event_in_full() -> None:
    said = parse_line(json.dumps(EVENT | {"gi": 1, "ci": 0}).encode())
    assert isinstance(said, EventReport)
    assert said.event == GpuEvent(GPUS[0].uuid, 8, 79, 1, 0)


def speaks(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Sequence[bytes]) -> None:
    """The event process says these lines, and then nothing."""
    words, program = folder / "words", folder / "program"
    words.write_bytes(b"".join(line + b"\n" for line in lines))
    program.write_text(
        f"#!{sys.executable} -I\nimport sys, time\n"
        f"sys.stdout.buffer.write(open({str(words)!r}, 'rb').read())\n"
        "sys.stdout.flush()\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
async def test_who_talks_nonsense_is_ended_and_another_one_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    good = json.dumps(EVENT).encode()
    speaks(tmp_path, monkeypatch, [b'{"type": "call", "call": "nvmlInit"}', good, line, good])
    async with listening(tmp_path, 0) as station:
        await station.until(lambda: len(station.pauses) >= 3)
        assert station.says("sent a malformed line after nvmlInit") == 1, "once for the same reason"
    assert station.pauses[:3] == [0.1, 0.2, 0.4]
    assert set(station.events) == {xid(0, 79)}
    assert len(station.events) in (3, 4), "what follows nonsense is not listened to"
    assert station.doubts >= 3


async def test_one_that_works_between_its_fits_is_not_started_in_a_tight_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = json.dumps({"type": "call", "call": module.WAIT}).encode()
    speaks(tmp_path, monkeypatch, [wait, wait, b"nonsense"])
    async with listening(tmp_path, 0) as station:
        await station.until(lambda: len(station.pauses) >= 4)
    assert station.pauses[:4] == [0.1, 0.2, 0.4, 0.8]


class Stuck:
    """A process inside the kernel, where no signal reaches it: it cannot be made, so it is played."""

    pid = 4711
    gone = False
    ends = 0

    async def send(self, line: bytes) -> None:
        """Lost."""

    async def receive(self) -> bytes:
        return b""

    def last_line(self) -> str:
        return ""

    async def end(self, grace_s: float) -> int | None:
        self.ends += 1
        return -9 if self.gone else None


async def test_what_cannot_be_killed_is_not_joined_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, real_start, started = Stuck(), LineProcess.start, []

    async def start(command: Sequence[str]) -> Stuck:
        started.append(command)
        return stuck

    root = build_fake_nvml(tmp_path, GPUS)
    monkeypatch.setattr(LineProcess, "start", start)
    async with listening(root, 1) as station:
        await station.until(lambda: len(station.pauses) >= 5)
        assert len(started) == 1
        assert stuck.ends >= 5, "it is tried again"
        assert station.says("process 4711 still hangs in start and cannot be killed") == 1
        monkeypatch.setattr(LineProcess, "start", real_start)
        stuck.gone = True
        await station.until(lambda: station.says("'gpus': 1"))
        happen(root, 1, EventType.XID, 79)
        await station.until(lambda: station.events)
