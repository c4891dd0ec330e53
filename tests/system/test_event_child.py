"""The process that waits for NVML's events, through the real binding and a made-up library."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.event_child import (
    WAIT,
    EventChild,
    EventReport,
    EventSink,
    MalformedLineError,
    WaitingFailed,
    parse_line,
)
from tests.support.log import Log
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence, happen
from tests.support.running import running
from tests.support.scripted_runtime import until

GPUS = tuple(FakeGpu(uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
BUS_IDS = tuple(f"0000:{0x10 + n:02x}:00.0" for n in range(3))
PATIENCE_S = 20.0


class Listener:
    """A listener under test, and what it reported."""

    def __init__(self, root: Path, log: Log, silence_s: float = 15.0) -> None:
        self.events: list[GpuEvent] = []
        self.doubts = 0
        self.pauses: list[float] = []
        self._log = log
        sink = EventSink(self.events.append, self._doubt)
        self.child = EventChild(root, (), sink, silence_s=silence_s, sleep=self._sleep)

    def _doubt(self) -> None:
        self.doubts += 1

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def logged(self, text: str) -> int:
        """How many lines have this text, in the message or a field."""
        return sum(text in str(line) for line in self._log.lines)

    async def until(self, fact: Callable[[], object]) -> None:
        await until("it", fact, PATIENCE_S)

    async def listens(self, gpus: int, times: int = 1) -> None:
        await self.until(lambda: self.logged(f"'gpus': {gpus}") == times)


Listening = Callable[..., AbstractAsyncContextManager[Listener]]


@pytest.fixture
def listening(tmp_path: Path, log: Log) -> Listening:
    """To these GPUs of the machine in the test's folder."""

    @asynccontextmanager
    async def listening(*gpus: int, silence_s: float = 15.0) -> AsyncIterator[Listener]:
        listener = Listener(tmp_path, log, silence_s)
        listener.child.listen(frozenset(BUS_IDS[gpu] for gpu in gpus))
        async with running(listener.child.run()):
            yield listener

    return listening


def xid(gpu: int, number: int) -> GpuEvent:
    return GpuEvent(GPUS[gpu].uuid, int(EventType.XID), number)


async def test_events_of_the_gpus_that_are_listened_to(tmp_path: Path, listening: Listening) -> None:
    root = build_fake_nvml(tmp_path, GPUS)
    happen(root, 1, EventType.XID, 13)  # before anybody listened
    async with listening(0, 1) as listener:
        await listener.listens(2)
        happen(root, 2, EventType.XID, 48)
        happen(root, 1, EventType.XID, 79)
        happen(root, 0, EventType.DOUBLE_BIT_ECC)
        await listener.until(lambda: len(listener.events) == 2)
        assert listener.events == [xid(1, 79), GpuEvent(GPUS[0].uuid, int(EventType.DOUBLE_BIT_ECC))]
        assert listener.doubts == 0


async def test_more_gpus_later_and_none_in_the_end(tmp_path: Path, listening: Listening) -> None:
    root = build_fake_nvml(tmp_path, GPUS)
    async with listening(0) as listener:
        await listener.listens(1)
        listener.child.listen(frozenset(BUS_IDS))
        await listener.listens(3)
        happen(root, 2, EventType.XID, 48)
        await listener.until(lambda: listener.events)
        # One fewer: NVML has to be left, which is what lets go of a node.
        listener.child.listen(frozenset(BUS_IDS[:1]))
        await listener.listens(1, times=2)
        calls = (root / "usr").rglob("fake-nvml.calls")
        assert next(calls).read_text().splitlines().count("nvmlShutdown") == 1
        listener.child.listen(frozenset())
        happen(root, 0, EventType.XID, 79)
        await asyncio.sleep(0)
        assert listener.events == [xid(2, 48)]


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"]
)
@pytest.mark.parametrize("code", [15, 999])
async def test_a_gpu_that_cannot_be_registered_does_not_affect_others(
    tmp_path: Path, listening: Listening, function: str, code: int
) -> None:
    root = build_fake_nvml(tmp_path, GPUS, [Act(function, "fail", code, gpu=1)])
    async with listening(0, 1, 2) as listener:
        await listener.listens(2)
        assert listener.logged("cannot listen for errors of this GPU") == 1
        happen(root, 2, EventType.XID, 79)
        await listener.until(lambda: listener.events)
        assert (listener.events, listener.doubts) == ([xid(2, 79)], 0)


async def test_an_event_without_a_gpu_is_logged_once(tmp_path: Path, listening: Listening) -> None:
    root = build_fake_nvml(tmp_path, GPUS)
    async with listening(0, 1) as listener:
        await listener.listens(2)
        happen(root, -1, EventType.XID, 79)
        happen(root, -1, EventType.XID, 79)
        happen(root, 1, EventType.XID, 31)
        await listener.until(lambda: listener.events)
        assert (listener.events, listener.doubts) == ([xid(1, 31)], 2)
        assert listener.logged("event names no GPU") == 1


async def test_a_lost_gpu_is_known_by_its_handle(tmp_path: Path, listening: Listening) -> None:
    """Its UUID was asked for once; afterwards NVML may not tell it any more."""
    root = build_fake_nvml(tmp_path, GPUS)
    async with listening(1) as listener:
        await listener.listens(1)
        asked = next((root / "usr").rglob("fake-nvml.calls"))
        before = asked.read_text().splitlines().count("nvmlDeviceGetUUID")
        happen(root, 1, EventType.XID, 79)
        await listener.until(lambda: listener.events)
        assert asked.read_text().splitlines().count("nvmlDeviceGetUUID") == before


@pytest.mark.parametrize("code", [15, 999])
async def test_waiting_that_fails_is_tried_again(tmp_path: Path, listening: Listening, code: int) -> None:
    root = build_fake_nvml(tmp_path, GPUS, [Act("nvmlEventSetWait_v2", "fail", code)])
    async with listening(0, 1) as listener:
        await listener.until(lambda: listener.doubts >= 2)
        assert listener.events == []
        assert listener.logged("not listening for GPU errors") == 1, "once for the same reason"
        configure(root, GPUS)
        await listener.until(lambda: listener.logged("listening for GPU errors again"))
        assert listener.pauses == sorted(listener.pauses)
        happen(root, 1, EventType.XID, 79)
        await listener.until(lambda: listener.events)


async def test_pauses_grow_while_it_fails_at_once(tmp_path: Path, listening: Listening) -> None:
    async with listening(0) as listener:  # no library there
        await listener.until(lambda: len(listener.pauses) >= 3)
        assert listener.pauses[:3] == [0.1, 0.2, 0.4]
        assert listener.logged("was not found: ") == 1


@pytest.mark.parametrize("deed", ["hang", "crash"])
async def test_a_driver_that_hangs_or_crashes_takes_only_the_process_along(
    tmp_path: Path, listening: Listening, deed: Literal["hang", "crash"]
) -> None:
    build_fake_nvml(tmp_path, GPUS, [Act("nvmlEventSetWait_v2", deed)])
    async with listening(0, silence_s=3.0) as listener:
        await listener.until(lambda: listener.doubts)
        assert listener.logged("nvmlEventSetWait_v2") >= 1


async def test_the_library_sees_an_empty_environment_and_no_capabilities(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the process that looks (inventory/test_nvml_child.py)."""
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
    root = build_fake_nvml(tmp_path, GPUS)
    async with listening(0) as listener:
        await listener.listens(1)
        assert evidence(root, "environ") == ""
        status = dict(line.split(":\t", 1) for line in evidence(root, "status").splitlines())
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"


# --- malformed lines --------------------------------------------------------------------------------------------------

EVENT = {"type": "event", "uuid": GPUS[0].uuid, "kind": 8, "xid": 79, "gi": None, "ci": None}
GARBAGE = {
    "no JSON": b"not json",
    "no UTF-8": b"\xff\xfe",
    "nested too deep": b"[" * 60_000,
    "too long": b'{"type": "unplaced", "why": "' + b"a" * 70_000 + b'"}',
    "a number too long to read": b'{"type": "event", "kind": ' + b"9" * 5000 + b"}",
    "an empty object": b"{}",
    "a type that we do not know": b'{"type": "word", "call": "nvmlInit"}',
    "an event that is none": b'{"type": "event"}',
    "a number out of all bounds": json.dumps(EVENT | {"xid": 1 << 70}).encode(),
    "one below them": json.dumps(EVENT | {"kind": -1}).encode(),
    "a UUID that colours": json.dumps(EVENT | {"uuid": "\x1b[31mGPU"}).encode(),
    "a UUID with a tail": json.dumps(EVENT | {"uuid": GPUS[0].uuid + "\n"}).encode(),
    "failed without names": b'{"type": "watching", "gpus": [], "failed": {"": "why"}}',
    "watching a malformed address": b'{"type": "watching", "gpus": ["../.."], "failed": {}}',
    "a call that breaks the line": b'{"type": "call", "call": "nvmlInit\\ninjected"}',
    "an empty fault": b'{"type": "fault", "why": ""}',
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
def test_a_malformed_line_is_no_event(line: bytes) -> None:
    with pytest.raises(MalformedLineError):
        parse_line(line)


def test_control_characters_are_replaced() -> None:
    assert parse_line(b'{"type": "fault", "why": "\\u001b[31mred\\nnext"}') == WaitingFailed("?[31mred?next")


def test_an_event_in_full() -> None:
    said = parse_line(json.dumps(EVENT | {"gi": 1, "ci": 0}).encode())
    assert isinstance(said, EventReport)
    assert said.event == GpuEvent(GPUS[0].uuid, 8, 79, 1, 0)


@pytest.mark.parametrize("number", [0, 65536, 2**31, 2**64 - 1])
def test_an_xid_is_any_number_that_nvml_can_report(number: int) -> None:
    said = parse_line(json.dumps(EVENT | {"xid": number}).encode())
    assert isinstance(said, EventReport)
    assert said.event.xid == number


def sends(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Sequence[bytes]) -> None:
    """The event process says these lines, and then nothing."""
    words, program = folder / "words", folder / "program"
    words.write_bytes(b"".join(line + b"\n" for line in lines))
    program.write_text(
        f"#!{Path(sys.executable).resolve()} -I\nimport sys, time\n"
        f"sys.stdout.buffer.write(open({str(words)!r}, 'rb').read())\n"
        "sys.stdout.flush()\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


async def test_a_process_that_sends_a_malformed_line_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listening: Listening
) -> None:
    """Not in a tight loop either, though it works for a moment each time."""
    waits, inits = (json.dumps({"type": "call", "call": call}).encode() for call in (WAIT, "nvmlInit"))
    good = json.dumps(EVENT).encode()
    sends(tmp_path, monkeypatch, [waits, waits, inits, good, GARBAGE["an event that is none"], good])
    async with listening(0) as listener:
        await listener.until(lambda: len(listener.pauses) >= 4)
        assert listener.logged("sent a malformed line after nvmlInit") == 1, "once for the same reason"
    assert listener.pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(listener.events) == {xid(0, 79)}
    assert len(listener.events) in (4, 5), "what follows a malformed line is not read"
    assert listener.doubts >= 4
