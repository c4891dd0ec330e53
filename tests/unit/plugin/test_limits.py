"""Too late, too large, broken inside: each fails its own request, and the connection and the ledger stay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri import status
from nri_gpu.ttrpc import SEND_MAX, StatusCode
from nri_gpu.ttrpc.mux import FIRST_FRAME_MAX
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_6
from tests.support.plugin import Station
from tests.support.scripted_runtime import until


async def test_a_reply_over_one_mux_frame(folder: Path, log: Log) -> None:
    pod = nri.asking("1")
    path = "/opt/" + "x" * 100_000
    async with Station(folder) as station:
        runtime = await station.connected()
        reply = await runtime.create(pod, nri.container(pod, env=[f"LD_LIBRARY_PATH={path}"]))
        assert isinstance(reply, pb.CreateContainerResponse)
        assert reply.ByteSize() > FIRST_FRAME_MAX
        assert {pair.key: pair.value for pair in reply.adjust.env}["LD_LIBRARY_PATH"].endswith(path)
    assert log.warnings() == []


async def test_a_reply_over_what_the_runtime_takes_is_a_refusal(folder: Path, log: Log) -> None:
    """An end of the connection would start the container without what it asked for."""
    pod = nri.asking("1")
    made = pb.Container(id="c", name="main", env=["LD_LIBRARY_PATH=/" + "x" * (SEND_MAX - 500)])
    async with Station(folder, request_bytes=0) as station:
        runtime = await station.connected(NRI_0_6)  # which could still list it
        refused = await runtime.create(pod, made)
        assert refused == status.INTERNAL
        assert (await runtime.call("Shutdown")).status.ok
    assert [line.text for line in log.warnings()] == ["answer too large"]


async def test_an_answer_to_a_runtime_that_is_gone(folder: Path, log: Log) -> None:
    """As after a stop of the daemon for longer than the runtime waits: the request is read, and nobody is there."""
    pod = nri.asking("4")
    async with Station(folder) as station:
        runtime = await station.connected()
        await runtime.write(runtime.request("CreateContainer", nri.create(pod, nri.container(pod))))
        runtime.close()
        await until("the grant", lambda: log.said("gpu granted"))
        assert station.phases() == {}
        await station.connected()
        assert station.phases() == {}


async def test_a_timeout_that_is_over_before_it_came(folder: Path, log: Log) -> None:
    pod = nri.asking("1")
    async with Station(folder) as station:
        runtime = await station.connected()
        late = await runtime.call("CreateContainer", nri.create(pod, nri.container(pod)), timeout_ns=-1)
        assert late.status == status.LATE
        assert station.phases() == {}
    assert log.one("request failed").fields["method"] == "CreateContainer"


async def test_a_request_that_waited_behind_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [nri.asking("1", "slow"), nri.asking("1", "waits")]
    async with Station(folder) as station:
        create = station.plugin.create_container

        def slowly(payload: bytes) -> object:
            time.sleep(0.3)
            return create(payload)

        monkeypatch.setattr(station.plugin, "create_container", slowly)
        runtime = await station.connected()
        payloads = [nri.create(pod, nri.container(pod)) for pod in pods]
        both = [runtime.request("CreateContainer", payload, timeout_ns=200_000_000) for payload in payloads]
        await runtime.write(b"".join(both))
        first, second = await runtime.answers(2)
        assert (first.status.code, second.status.code) == (StatusCode.OK, StatusCode.DEADLINE_EXCEEDED)
        assert list(station.phases()) == [nri.container(pods[0]).id]


async def test_a_bug_in_a_handler_over_the_wire(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = nri.asking("1")
    async with Station(folder) as station:
        runtime = await station.connected()

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr("nri_gpu.nri.convert.reply_to_pb", broken)
            assert await runtime.create(pod, nri.container(pod)) == status.INTERNAL
        assert station.phases() == {}
        assert isinstance(await runtime.create(pod, nri.container(pod)), pb.CreateContainerResponse)
    assert isinstance(log.one("bug in a handler").exception, ZeroDivisionError)
