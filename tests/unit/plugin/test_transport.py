"""Bytes that make no sense, at every stage of a connection, and messages that are too late, too large or not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri import codes
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.transport import ConnectionLimits
from nri_gpu.ttrpc import RESPONSE_MAX, SEND_MAX, Status, StatusCode
from nri_gpu.ttrpc.frames import DISCARD_MAX, RECEIVE_MAX
from tests.support import nri_messages as nri
from tests.support.errors import HarnessError
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_6, NRI_0_12
from tests.support.plugin import Bench, ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime, until
from tests.unit.plugin.raw import cut_off, frame, mux

Stage = Callable[[ScriptedRuntime], Awaitable[object]]


async def half_a_synchronize(runtime: ScriptedRuntime) -> None:
    await runtime.register()
    await runtime.ask("Synchronize", pb.SynchronizeRequest(more=True).SerializeToString())


STAGES: Final[dict[str, Stage]] = {
    "before registration": lambda _: asyncio.sleep(0),
    "registration unanswered": ScriptedRuntime.registration,
    "configured": ScriptedRuntime.register,
    "half synchronized": half_a_synchronize,
    "ready": ScriptedRuntime.handshake,
}


# name -> bytes, words of the reason for which the connection ends: by itself, or once nothing follows them
FATAL: Final = {
    "garbage": (b"\xff" * 4096, "over the limit"),
    "http": (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", "over the limit"),
    "mux length": (mux(1, b"", RECEIVE_MAX + 11), f"message of {RECEIVE_MAX + 11} bytes is over the limit"),
    "frame length": (mux(1, frame(DISCARD_MAX + 1, 1001, 1)), f"message of {DISCARD_MAX + 1} bytes is over the limit"),
    "a message cut off": (cut_off(RECEIVE_MAX + 1), f"message of {RECEIVE_MAX + 1} bytes is over the limit of"),
    "half a mux header": (b"\x00\x00\x00", "socket closed in the middle of a mux frame"),
    "half a mux frame": (mux(1, b"\x00" * 5, 50), "socket closed in the middle of a mux frame"),
    "half a frame": (mux(1, frame(500, 1001, 1, b"abc")), "connection closed in the middle of a frame"),
    "nothing": (b"", "the runtime closed the connection"),
}


async def comes_back(served: ServedPlugin, log: Log, words: str) -> None:
    """A fresh session after a broken one, and one clear line in between."""
    again = await served.listener.accept()
    assert (await again.handshake()).name == "nri-gpu"
    pod = nri.asking("1")
    assert isinstance(await again.create(pod, nri.container(pod)), pb.CreateContainerResponse)
    assert [line.text for line in log.warnings()] == ["connection ended, reconnecting"]
    assert words in log.warnings()[-1].fields["fault"]
    assert words in served.away[-1]


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize(("bad", "words"), FATAL.values(), ids=FATAL)
async def test_bytes_that_end_the_connection(folder: Path, log: Log, stage: Stage, bad: bytes, words: str) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.listener.accept()
        await stage(runtime)
        await runtime.write(bad)
        if "closed" in words:
            runtime.finish_writing()
        await runtime.ended()
        await comes_back(served, log, words)


async def test_reconnecting_is_a_matter_of_milliseconds(folder: Path) -> None:
    """Every second away is one in which containers start without us."""
    async with ServedPlugin(folder) as served:
        took = []
        for _ in range(10):
            runtime = await served.connected()
            runtime.close()
            began = time.monotonic()
            again = await served.listener.accept()
            took.append(time.monotonic() - began)
            again.close()
    assert sorted(took)[len(took) // 2] < 0.1  # a busy machine may delay a few


async def test_what_concerns_one_request_leaves_the_connection(folder: Path, log: Log) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        await runtime.write(mux(1, frame(0, 2, 1)))  # even id: InvalidArgument on a stream nobody here knows
        await runtime.write(mux(7, b"for a connection that is not there"))
        await runtime.write(mux(1, frame(3, 1, 99, b"abc")))  # unknown type: ignored
        await runtime.write(mux(2, frame(0, 99, 2)))  # an answer to a call nobody made
        await runtime.write(mux(1, b""))
        assert (await runtime.call("Shutdown")).status.ok
    assert [line.text for line in log.warnings()] == ["request rejected"]
    reason = log.one("request rejected").fields["reason"]
    assert reason == "INVALID_ARGUMENT: stream id 2 is even: clients choose odd ones"


async def test_a_payload_that_is_no_protobuf(folder: Path, log: Log) -> None:
    # The first look at the raw bytes must see something of ours, or they are not decoded at all.
    bad = b"\xff\xffgpu.nri.io"
    async with ServedPlugin(folder) as served:
        runtime = await served.listener.accept()
        assert (await runtime.call("Configure", bad)).status == codes.MALFORMED
        await runtime.register(NRI_0_12)
        assert (await runtime.call("Synchronize", bad)).status == codes.MALFORMED
        await runtime.synchronize()
        assert served.ready == 1
        for method in ("CreateContainer", "StateChange", "StartContainer", "RemoveContainer", "StopContainer"):
            assert (await runtime.call(method, bad)).status == codes.MALFORMED, method
        assert served.plugin.ledger.entries == {}
    assert {line.text for line in log.warnings()} == {"request failed"}


UNREAD: Final = {
    "for too long": (ConnectionLimits(stall_s=0.2), "the runtime has not read our answers for 0 s"),
    "too many": (ConnectionLimits(unread_bytes=1 << 16, stall_s=600.0), "the runtime left 0 MiB of our answers unread"),
}


@pytest.mark.parametrize(("limits", "words"), UNREAD.values(), ids=UNREAD)
async def test_unread_answers_have_a_limit(folder: Path, log: Log, limits: ConnectionLimits, words: str) -> None:
    pod = nri.asking("device=99")
    async with ServedPlugin(folder, limits=limits) as served:
        runtime = await served.connected()
        request = nri.create(pod, nri.container(pod))
        with pytest.raises((OSError, HarnessError)):  # until the plugin hangs up on us
            while True:
                await runtime.write(runtime.request("CreateContainer", request, timeout_ns=60 * 10**9))
        await comes_back(served, log, words)


def long_path(size_bytes: int) -> pb.Container:
    """A container whose LD_LIBRARY_PATH, which the answer repeats, has so many bytes."""
    return pb.Container(id="c", name="main", env=["LD_LIBRARY_PATH=" + "/".ljust(size_bytes, "x")])


async def test_a_reply_over_what_the_runtime_takes_is_a_refusal_that_grants_nothing(folder: Path, log: Log) -> None:
    """An end of the connection would start the container without what it asked for."""
    pod = nri.asking("4")
    reply = Bench().plugin.create_container(nri.create(pod, long_path(3 << 20)))
    assert isinstance(reply, bytes)
    longest = RESPONSE_MAX - len(reply) + (3 << 20)
    async with ServedPlugin(folder, request_bytes=0) as served:
        runtime = await served.connected(NRI_0_6)  # which could still list it
        refused = await runtime.create(pod, long_path(longest + 1))
        assert isinstance(refused, Status)
        assert f"[request-too-large]: the answer to the runtime would have {RESPONSE_MAX + 1} bytes" in refused.message
        assert served.phases() == {}
        assert served.plugin.ledger.live == {}
        assert not isinstance(await runtime.create(nri.asking("4", "other"), nri.container(pod)), Status)
        await runtime.event(Event.REMOVE_CONTAINER, pod, nri.container(pod))
        assert not isinstance(await runtime.create(pod, long_path(longest)), Status)
    assert [line.fields["code"] for line in log.said("container refused")] == ["request-too-large"]
    assert log.warnings() == []


async def test_an_answer_that_cannot_be_sent_is_no_grant(
    folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it too large: what is refused at last holds nothing."""
    pod = nri.asking("4")
    async with ServedPlugin(folder) as served:
        create = served.plugin.create_container

        def padded(payload: bytes) -> object:
            reply = create(payload)
            assert isinstance(reply, bytes)
            too_much = pb.ContainerUpdate(container_id="x" * SEND_MAX)
            return reply + pb.CreateContainerResponse(update=[too_much]).SerializeToString()

        monkeypatch.setattr(served.plugin, "create_container", padded)
        runtime = await served.connected()
        assert await runtime.create(pod, nri.container(pod)) == codes.INTERNAL
        assert set(served.phases().values()) <= {"lapsed"}
        assert (await runtime.call("Shutdown")).status.ok
    assert log.one("answer too large").level == "ERROR"


async def test_an_answer_to_a_runtime_that_is_gone(folder: Path, log: Log) -> None:
    """As after a stop of the daemon for longer than the runtime waits: the request is read, and nobody is there."""
    pod = nri.asking("4")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        runtime.close()
        await until("the grant", lambda: log.said("GPU granted"))
        assert set(served.phases().values()) <= {"lapsed"}
        await served.connected()
        assert set(served.phases().values()) <= {"lapsed"}


async def test_a_request_that_waited_behind_another_is_too_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [nri.asking("1", "slow"), nri.asking("1", "waits")]
    async with ServedPlugin(folder) as served:
        create = served.plugin.create_container

        def slowly(payload: bytes) -> object:
            time.sleep(0.3)
            return create(payload)

        monkeypatch.setattr(served.plugin, "create_container", slowly)
        runtime = await served.connected()
        payloads = [nri.create(pod, nri.container(pod)) for pod in pods]
        both = [runtime.request("CreateContainer", payload, timeout_ns=200_000_000) for payload in payloads]
        await runtime.write(b"".join(both))
        first, second = await runtime.answers(2)
        assert (first.status.code, second.status) == (StatusCode.OK, codes.LATE)
        assert list(served.phases()) == [nri.container(pods[0]).id]


async def test_a_refused_registration_with_the_socket_left_open(folder: Path, log: Log) -> None:
    """The runtime answers a bad index with an error and then does nothing at all: closing is up to us."""
    refusal = Status(StatusCode.UNKNOWN, 'invalid plugin index: "1x"')
    async with ServedPlugin(folder) as served:
        for _ in range(3):
            runtime = await served.listener.accept()
            request, _ = await runtime.registration()
            await runtime.answer(request, refusal)
            await runtime.ended()
        await comes_back(served, log, 'registration failed: UNKNOWN: invalid plugin index: "1x"')
        assert len(served.away) == 3


async def answered(runtime: ScriptedRuntime) -> None:
    request, _ = await runtime.registration()
    await runtime.answer(request)


async def began(runtime: ScriptedRuntime) -> None:
    await runtime.register()
    await runtime.ask("Synchronize", pb.SynchronizeRequest(more=True).SerializeToString())


NOT_WHOLE: Final = "no whole Synchronize within 0 s"
# A runtime like containerd 1.7 keeps a plugin whose Synchronize failed, and never calls it.
SILENT: Final[dict[str, tuple[ConnectionLimits, Stage, str]]] = {
    "registration": (
        ConnectionLimits(register_s=0.1),
        ScriptedRuntime.registration,
        "RegisterPlugin not answered within 0 s",
    ),
    "Configure": (ConnectionLimits(synchronize_s=0.1), answered, NOT_WHOLE),
    "the end of Synchronize": (ConnectionLimits(synchronize_s=0.1), began, NOT_WHOLE),
}


@pytest.mark.parametrize(("limits", "stage", "words"), SILENT.values(), ids=SILENT)
async def test_what_never_comes(folder: Path, log: Log, limits: ConnectionLimits, stage: Stage, words: str) -> None:
    async with ServedPlugin(folder, limits=limits) as served:
        runtime = await served.listener.accept()
        await stage(runtime)
        await runtime.ended()
        await comes_back(served, log, words)
