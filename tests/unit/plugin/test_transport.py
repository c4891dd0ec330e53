"""Bytes that make no sense, at every stage of a connection: one line in the log, and a fresh session right after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.plugin import supervisor as supervise
from nri_gpu.plugin import transport
from nri_gpu.ttrpc import Status, StatusCode
from nri_gpu.ttrpc.frame import DISCARD_MAX, RECEIVE_MAX
from tests.support import nri_messages as nri
from tests.support.errors import HarnessError
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_12
from tests.support.plugin import Station
from tests.support.scripted_runtime import ScriptedRuntime

Stage = Callable[[ScriptedRuntime], Awaitable[object]]


async def nothing(_: ScriptedRuntime) -> None:
    pass


async def register_only(runtime: ScriptedRuntime) -> None:
    await runtime.registration()


async def half_a_synchronize(runtime: ScriptedRuntime) -> None:
    await runtime.register()
    await runtime.ask("Synchronize", pb.SynchronizeRequest(more=True).SerializeToString())


STAGES: Final[dict[str, Stage]] = {
    "before registration": nothing,
    "registration unanswered": register_only,
    "configured": ScriptedRuntime.register,
    "half synchronized": half_a_synchronize,
    "ready": ScriptedRuntime.handshake,
}
each_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


def mux(conn_id: int, payload: bytes, length: int | None = None) -> bytes:
    return conn_id.to_bytes(4, "big") + (len(payload) if length is None else length).to_bytes(4, "big") + payload


def frame(length: int, stream_id: int, kind: int, data: bytes = b"") -> bytes:
    return length.to_bytes(4, "big") + stream_id.to_bytes(4, "big") + bytes((kind, 0)) + data


# name -> bytes that end the connection, words of the reason
FATAL: Final = {
    "garbage": (b"\xff" * 4096, "over the limit"),
    "http": (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", "over the limit"),
    "mux length": (mux(1, b"", RECEIVE_MAX + 11), f"message of {RECEIVE_MAX + 11} bytes is over the limit"),
    "frame length": (mux(1, frame(DISCARD_MAX + 1, 1001, 1)), f"message of {DISCARD_MAX + 1} bytes is over the limit"),
}
# name -> bytes that end the connection once nothing follows them
CUT: Final = {
    "half a mux header": (b"\x00\x00\x00", "socket closed in the middle of a mux frame"),
    "half a mux frame": (mux(1, b"\x00" * 5, 50), "socket closed in the middle of a mux frame"),
    "half a frame": (mux(1, frame(500, 1001, 1, b"abc")), "connection closed in the middle of a frame"),
}


async def comes_back(station: Station, log: Log, words: str, before: int = 0) -> None:
    """A fresh session after a broken one, and one clear line in between. before: warnings about something else."""
    again = await station.listener.accept()
    assert (await again.handshake()).name == "nri-gpu"
    pod = nri.asking("1")
    assert isinstance(await again.create(pod, nri.container(pod)), pb.CreateContainerResponse)
    assert [line.text for line in log.warnings()][before:] == ["connection ended, reconnecting"]
    assert words in log.warnings()[-1].fields["fault"]
    assert words in station.away[-1]


@each_stage
@pytest.mark.parametrize("bad", FATAL.values(), ids=FATAL.keys())
async def test_garbage_at_every_stage(folder: Path, log: Log, stage: Stage, bad: tuple[bytes, str]) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await stage(runtime)
        await runtime.write(bad[0])
        await runtime.ended()
        await comes_back(station, log, bad[1])


@each_stage
@pytest.mark.parametrize("bad", CUT.values(), ids=CUT.keys())
async def test_an_end_in_the_middle(folder: Path, log: Log, stage: Stage, bad: tuple[bytes, str]) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await stage(runtime)
        await runtime.write(bad[0])
        runtime.finish_writing()
        await runtime.ended()
        await comes_back(station, log, bad[1])


@each_stage
@pytest.mark.parametrize("end", ["close", "half close"])
async def test_closed_at_every_stage(folder: Path, log: Log, stage: Stage, end: str) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await stage(runtime)
        if end == "close":
            runtime.close()
        else:
            runtime.finish_writing()
            await runtime.ended()
        await comes_back(station, log, "")


async def test_reconnecting_is_a_matter_of_milliseconds(folder: Path, log: Log) -> None:
    """Every second away is one in which containers start without us."""
    async with Station(folder) as station:
        took = []
        for _ in range(10):
            runtime = await station.connected()
            runtime.close()
            began = time.monotonic()
            again = await station.listener.accept()
            took.append(time.monotonic() - began)
            again.close()
    assert sorted(took)[len(took) // 2] < 0.1
    assert max(took) < 0.3


async def test_a_runtime_that_drops_us_again_and_again_is_told_of_once(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        for _ in range(4):
            runtime = await station.listener.accept()
            await runtime.registration()
            runtime.close()
        await comes_back(station, log, "the runtime closed the connection")
        assert len(set(station.away)) == 1
        assert len(station.away) == 4


async def test_bytes_one_by_one(folder: Path, log: Log) -> None:
    pod = nri.asking("2")
    async with Station(folder) as station:
        runtime = await station.connected()
        request = runtime.request("CreateContainer", nri.create(pod, nri.container(pod)))
        for at in range(len(request)):
            await runtime.write(request[at : at + 1])
            await asyncio.sleep(0)
        (answer,) = await runtime.answers(1)
        assert answer.status.ok
        assert len(pb.CreateContainerResponse.FromString(answer.payload).adjust.linux.devices) == 2 + 3
    assert log.warnings() == []


async def test_many_requests_in_one_write(folder: Path) -> None:
    pods = [nri.asking("1;mode=shared", f"pod-{number}") for number in range(50)]
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(b"".join(runtime.request("CreateContainer", nri.create(p, nri.container(p))) for p in pods))
        answers = await runtime.answers(50)
        assert [answer.stream_id for answer in answers] == sorted(answer.stream_id for answer in answers)
        assert all(answer.status.ok for answer in answers)
        assert len(station.plugin.ledger.entries) == 50


async def test_what_concerns_one_request_leaves_the_connection(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(mux(1, frame(0, 2, 1)))  # even id: InvalidArgument on a stream nobody here knows
        await runtime.write(mux(7, b"for a connection that is not there"))
        await runtime.write(mux(1, frame(3, 1, 99, b"abc")))  # unknown type: ignored
        await runtime.write(mux(1, b""))
        assert (await runtime.call("Shutdown")).status.ok
    assert [line.text for line in log.warnings()] == ["request rejected"]
    assert (
        log.one("request rejected").fields["reason"] == "INVALID_ARGUMENT: stream id 2 is even: clients choose odd ones"
    )


async def test_a_message_of_which_the_rest_cannot_come(folder: Path, log: Log) -> None:
    """NRI 0.6 writes the first 4 KiB of a message that its mux then refuses."""
    length = RECEIVE_MAX + 1
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(mux(1, (frame(length, 1001, 1) + b"\0" * 4096)[:4096]))
        await runtime.ended()
        await comes_back(station, log, f"message of {length} bytes is over the limit of {RECEIVE_MAX}")


async def test_a_payload_that_is_no_protobuf(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.connected(NRI_0_12)
        # The first look at the raw bytes must see something of ours, or they are not decoded at all.
        bad = b"\xff\xffgpu.nri.io"
        for method in ("CreateContainer", "StateChange", "StartContainer", "RemoveContainer", "StopContainer"):
            answer = await runtime.call(method, bad)
            assert answer.status.code is StatusCode.INVALID_ARGUMENT, method
        assert station.plugin.ledger.entries == {}
    assert {line.text for line in log.warnings()} == {"request failed"}


async def test_configure_and_synchronize_that_are_no_protobuf(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        assert (await runtime.call("Configure", b"\xff")).status.code is StatusCode.INVALID_ARGUMENT
        await runtime.register()
        assert (await runtime.call("Synchronize", b"\xff")).status.code is StatusCode.INVALID_ARGUMENT
        await runtime.synchronize()
        assert station.ready == 1
    assert len(log.said("request failed")) == 2


async def test_an_answer_to_a_call_nobody_made_is_dropped(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(mux(2, frame(0, 99, 2)))
        assert (await runtime.call("Shutdown")).status.ok
    assert log.warnings() == []


async def test_a_runtime_that_stops_reading(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STALL_S", 0.2)
    pod = nri.asking("device=99")
    async with Station(folder) as station:
        runtime = await station.connected()
        request = nri.create(pod, nri.container(pod))
        with pytest.raises((OSError, HarnessError)):  # until the plugin hangs up on us
            while True:
                await runtime.write(runtime.request("CreateContainer", request))
        await comes_back(station, log, "the runtime has not read our answers for 0 s")


async def test_unread_answers_have_a_limit(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "UNREAD_MAX", 1 << 20)
    monkeypatch.setattr(transport, "STALL_S", 600.0)  # the other limit, which a busy machine would meet first
    pod = nri.asking("device=99")
    async with Station(folder) as station:
        runtime = await station.connected()
        with pytest.raises((OSError, HarnessError)):
            while True:
                await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        await comes_back(station, log, "the runtime left 1 MiB of our answers unread")


async def test_a_refused_registration_with_the_socket_left_open(folder: Path, log: Log) -> None:
    """The runtime answers a bad index with an error and then does nothing at all: closing is up to us."""
    refusal = Status(StatusCode.UNKNOWN, 'invalid plugin index: "1x"')
    async with Station(folder) as station:
        for _ in range(3):
            runtime = await station.listener.accept()
            request, _ = await runtime.registration()
            await runtime.answer(request, refusal)
            await runtime.ended()
        await comes_back(station, log, 'registration failed: UNKNOWN: invalid plugin index: "1x"')


async def test_a_registration_nobody_answers(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "REGISTER_TIMEOUT_S", 0.1)
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await runtime.registration()
        await runtime.ended()
        await comes_back(station, log, "RegisterPlugin not answered within 0 s")


async def test_no_synchronize_ever(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime like containerd 1.7 keeps a plugin whose Synchronize failed, and never calls it."""
    monkeypatch.setattr(supervise, "SYNCHRONIZE_TIMEOUT_S", 0.1)
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await runtime.register()
        await runtime.ended()
        await comes_back(station, log, "no Synchronize within 0 s")
