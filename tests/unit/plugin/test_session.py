"""Registration, Configure, Synchronize and every method, as each NRI version speaks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu._pb import ttrpc_pb2
from nri_gpu.nri.convert import Configured
from nri_gpu.nri.events import Event
from nri_gpu.plugin.handlers import EVENTS
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.service import PLUGIN, PluginService
from nri_gpu.plugin.supervisor import Identity
from nri_gpu.ttrpc import PLUGIN_SERVICE, Status, StatusCode
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import FLAVOURS, NRI_0_6, NRI_0_8, NRI_0_12, Flavour
from tests.support.plugin import Bench, Station
from tests.support.scripted_runtime import until

OUR_MASK = sum(1 << (event - 1) for event in EVENTS)
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Plugin"].methods]

each_version = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())


@each_version
@pytest.mark.parametrize("configure_first", [False, True], ids=["reply first", "configure first"])
async def test_registers_in_either_order(folder: Path, log: Log, flavour: Flavour, configure_first: bool) -> None:
    async with Station(folder) as station:
        station.identity = Identity("my-gpu", "42")
        runtime = await station.listener.accept()
        registered = await runtime.register(flavour, configure_first=configure_first)
        await runtime.synchronize()
        assert (registered.name, registered.index) == ("my-gpu", "42")
        assert registered.events == OUR_MASK & flavour.known_mask
        assert registered.events & ~flavour.known_mask == 0
        assert station.ready == 1
    assert log.one("registered").fields["nri_version"] == flavour.configure.get("NRI_version", "unknown")
    assert log.warnings() == []


@each_version
async def test_tells_what_the_runtime_said_of_itself(folder: Path, log: Log, flavour: Flavour) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await runtime.register(flavour, config='[plugin]\nindex = "11"\n')
        (said,) = station.configured
        expected = flavour.configure
        assert said == Configured(
            runtime="containerd",
            version=expected["runtime_version"],
            nri_version=expected.get("NRI_version", ""),
            request_timeout_ms=expected.get("request_timeout", 0),
            config='[plugin]\nindex = "11"\n',
        )
    assert log.one("registered").fields["runtime_version"] == expected["runtime_version"]


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
async def test_synchronize_in_parts_some_of_them_empty(folder: Path, log: Log, parts: int) -> None:
    pods = [nri.asking("1", f"pod-{number}") for number in range(3)]
    async with Station(folder) as station:
        granting = await station.connected()
        listed = []
        for pod in pods:
            made = nri.container(pod)
            reply = await granting.create(pod, made)
            assert isinstance(reply, pb.CreateContainerResponse)
            listed.append(nri.running(nri.adjusted(made, reply)))
        lived = {key: entry.grant for key, entry in station.plugin.ledger.entries.items()}
        granting.close()
        runtime = await station.listener.accept()
        await runtime.register()
        await runtime.synchronize(pods, listed, parts)
        assert {key: entry.grant for key, entry in station.plugin.ledger.entries.items()} == lived
        assert station.ready == 2
    assert len(log.said("ledger rebuilt")) == 2


async def test_a_synchronize_far_over_one_frame(folder: Path, log: Log) -> None:
    """Runtimes up to NRI 0.6 send the whole node in one message; 6.2 MB were seen."""
    pod = nri.pod()
    big = [nri.running(nri.container(pod, f"c{number}", env=["X=" + "x" * 50_000])) for number in range(120)]
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        await runtime.register(NRI_0_6)
        request = pb.SynchronizeRequest(pods=[pod], containers=big).SerializeToString()
        assert len(request) > 6_000_000
        # The scripted runtime's sender obeys today's limit, so this frame is put together by hand.
        await runtime.write(_oversize_frame(runtime.mux[PLUGIN_SERVICE].next_stream_id, "Synchronize", request))
        await until("the plugin to be ready", lambda: station.ready == 1)
    assert log.warnings() == []


def _oversize_frame(stream_id: int, method: str, payload: bytes) -> bytes:
    data = ttrpc_pb2.Request(service=PLUGIN, method=method, payload=payload).SerializeToString()
    frame = len(data).to_bytes(4, "big") + stream_id.to_bytes(4, "big") + b"\x01\x00" + data
    return (1).to_bytes(4, "big") + len(frame).to_bytes(4, "big") + frame


async def test_every_method_is_answered(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.connected(NRI_0_12)
        for method in METHODS:
            if method not in ("Configure", "Synchronize"):
                assert (await runtime.call(method)).status.ok, method
    assert len(METHODS) == 18
    assert log.warnings() == []


def test_the_table_is_the_whole_service() -> None:
    bench = Bench()
    service = PluginService(bench.plugin, lambda _: None, lambda: None, Sizes(lambda: 0, bench.later))
    assert set(service.handlers) == set(METHODS)


async def test_an_unknown_method_gets_the_code_that_runtimes_fall_back_on(folder: Path) -> None:
    async with Station(folder) as station:
        runtime = await station.connected()
        assert (await runtime.call("Juggle")).status == Status(StatusCode.UNIMPLEMENTED, "method Juggle")
        other = await runtime.call("Configure", service="nri.pkg.api.v1alpha1.Runtime")
        assert other.status == Status(StatusCode.UNIMPLEMENTED, "service nri.pkg.api.v1alpha1.Runtime")
        assert (await runtime.call("Shutdown")).status.ok  # and the connection lives


@each_version
async def test_events_come_both_ways(folder: Path, flavour: Flavour) -> None:
    pod = nri.asking("1")
    made = nri.container(pod)
    async with Station(folder) as station:
        runtime = await station.connected(flavour)
        for last in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
            assert isinstance(await runtime.create(pod, made), pb.CreateContainerResponse)
            assert (await runtime.event(Event.START_CONTAINER, pod, made)).ok
            assert station.phases() == {made.id: "running"}
            assert (await runtime.event(last, pod, made)).ok
            assert station.plugin.ledger.entries == {}


@each_version
@pytest.mark.parametrize("last", [Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX])
async def test_the_end_of_a_pod_frees_its_gpus(folder: Path, flavour: Flavour, last: Event) -> None:
    pod, other = nri.asking("1"), nri.asking("1", "other")
    async with Station(folder) as station:
        runtime = await station.connected(flavour)
        for of in (pod, other):
            assert isinstance(await runtime.create(of, nri.container(of)), pb.CreateContainerResponse)
            assert (await runtime.event(Event.START_CONTAINER, of, nri.container(of))).ok
        assert (await runtime.event(last, pod)).ok
        assert list(station.plugin.ledger.entries) == [nri.container(other).id]


@each_version
async def test_events_nobody_asked_for_are_answered_all_the_same(folder: Path, flavour: Flavour) -> None:
    pod = nri.asking("1")
    async with Station(folder) as station:
        runtime = await station.connected(flavour)
        for kind in set(nri.OWN_RPC) - {Event.START_CONTAINER}:  # that one is refused: nothing was granted
            assert (await runtime.event(kind, pod, nri.container(pod))).ok
        strange = pb.StateChangeEvent(event=99, pod=pod).SerializeToString()  # type: ignore[arg-type] # from the future
        assert (await runtime.call("StateChange", strange)).status.ok


async def test_configure_twice_and_events_too_early_are_out_of_order(folder: Path, log: Log) -> None:
    async with Station(folder) as station:
        runtime = await station.listener.accept()
        early = await runtime.call("CreateContainer", nri.create(nri.pod(), nri.container(nri.pod())))
        assert early.status.code is StatusCode.FAILED_PRECONDITION
        await runtime.register(NRI_0_8)
        again = await runtime.call("Configure", nri.configure(NRI_0_8))
        assert again.status.code is StatusCode.FAILED_PRECONDITION
        assert "Configure came while the session was configured" in again.status.message
        await runtime.synchronize()
        assert station.ready == 1
    assert [line.text for line in log.warnings()] == ["request failed", "request failed"]
