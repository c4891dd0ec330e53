"""From a request to its answer: the table of methods, order, deadlines, failures. Nothing ever stays unanswered."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri import codes
from nri_gpu.nri.convert import DecodeError
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.nri_service import MARGIN_NS, PLUGIN, PluginService
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.ttrpc import RequestReceived, ResponseSent, Status, StatusCode, StreamId
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import FLAVOURS, NRI_0_6, NRI_0_8, NRI_0_12, Flavour
from tests.support.plugin import Bench, ServedPlugin

SECOND: Final = 1_000_000_000
METHODS: Final = [method.name for method in pb.DESCRIPTOR.services_by_name["Plugin"].methods]
each_version = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())


def request(
    method: str = "CreateContainer", payload: bytes = b"", timeout_ns: int = 2 * SECOND, service: str = PLUGIN
) -> RequestReceived:
    return RequestReceived(StreamId(7), service, method, payload, timeout_ns)


def answer(
    outcome: bytes | Status | Exception = b"",
    asked: RequestReceived | None = None,
    waited_ns: int = 0,
    flavour: Flavour = NRI_0_6,
) -> ResponseSent:
    """Of a configured service. outcome: what its plugin answers to CreateContainer, or raises."""

    def create_container(_: bytes) -> bytes | Status:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    bench = Bench()
    bench.plugin.create_container = create_container  # type: ignore[method-assign,assignment] # a plugin with a bug
    sizes = Sizes(lambda: PluginSettings(request_bytes=0), bench.later)
    service = PluginService(bench.plugin, lambda _: None, lambda: None, sizes)
    assert service.answer(request("Configure", nri.configure(flavour))).status.ok
    return service.answer(asked or request(), waited_ns)


@pytest.mark.parametrize("outcome", [b"done", Status(StatusCode.PERMISSION_DENIED, "no")])
def test_an_answer_goes_back_on_its_stream_without_a_line_in_the_log(log: Log, outcome: bytes | Status) -> None:
    expected = {"status": outcome} if isinstance(outcome, Status) else {"payload": outcome}
    assert answer(outcome) == ResponseSent(StreamId(7), **expected)
    assert log.lines == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DecodeError("Error parsing message"), codes.MALFORMED),
        (RemoteProtocolError("x"), Status(StatusCode.FAILED_PRECONDITION, "nri-gpu [out-of-order]: x.")),
        (KeyError("/etc/shadow"), codes.INTERNAL),
        (RecursionError(), codes.INTERNAL),
        (MemoryError(), codes.INTERNAL),
    ],
)
def test_what_a_handler_raises_becomes_a_status(log: Log, raised: Exception, expected: Status) -> None:
    assert answer(raised).status == expected
    (line,) = log.lines
    if expected is codes.INTERNAL:
        assert (line.level, line.text, line.exception) == ("ERROR", "bug in a handler", raised)
    else:
        assert (line.level, line.text) == ("WARNING", "request failed")
    assert (line.fields["method"], line.fields["stream_id"]) == ("CreateContainer", 7)


@pytest.mark.parametrize(
    ("timeout_ns", "waited_ns", "late"),
    [
        (0, 10 * SECOND, False),  # no limit
        (-1, 0, True),  # over before it came (ttrpc: server.go)
        (2 * SECOND, 0, False),
        (2 * SECOND, 2 * SECOND - MARGIN_NS, False),
        (2 * SECOND, 2 * SECOND - MARGIN_NS + 1, True),
        (MARGIN_NS, MARGIN_NS // 2, False),  # a margin as long as the whole would refuse everything
        (MARGIN_NS, MARGIN_NS // 2 + 1, True),
        (1, 0, False),
    ],
)
def test_late_is_told_before_the_handler_runs(log: Log, timeout_ns: int, waited_ns: int, late: bool) -> None:
    given = answer(LookupError("it ran"), request(timeout_ns=timeout_ns), waited_ns)
    assert given.status == (codes.LATE if late else codes.INTERNAL)
    assert len(log.warnings()) == 1


@pytest.mark.parametrize(("own_ns", "late"), [(0, True), (60 * SECOND, False), (SECOND, True)])
def test_a_request_without_a_time_of_its_own_has_the_runtimes(own_ns: int, late: bool) -> None:
    given = answer(b"", request(timeout_ns=own_ns), 2 * SECOND, NRI_0_8)
    assert (given.status == codes.LATE) is late


def test_unknown_methods_and_services_are_not_worth_a_line(log: Log) -> None:
    """Newer runtimes try methods we do not have, for each event of each container, and fall back on this code."""
    assert answer(b"", request("Dance")).status == Status(StatusCode.UNIMPLEMENTED, "method Dance")
    assert answer(b"", request(service="b.S")).status == Status(StatusCode.UNIMPLEMENTED, "service b.S")
    assert log.warnings() == []


async def test_every_method_of_the_service_is_answered(folder: Path, log: Log) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(NRI_0_12)
        for method in METHODS:
            if method not in ("Configure", "Synchronize"):
                assert (await runtime.call(method)).status.ok, method
    assert log.warnings() == []


@each_version
async def test_a_container_lives_and_its_pod_ends_by_the_events_of_each_version(folder: Path, flavour: Flavour) -> None:
    pod, other = nri.asking("1"), nri.asking("1", "other")
    made, stays = nri.container(pod), nri.container(other)
    ends = {Event.STOP_CONTAINER: made, Event.REMOVE_CONTAINER: made}
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        assert isinstance(await runtime.create(other, stays), pb.CreateContainerResponse)
        for last in (*ends, Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX):
            assert isinstance(await runtime.create(pod, made), pb.CreateContainerResponse)
            assert (await runtime.event(Event.START_CONTAINER, pod, made)).ok
            assert served.phases() == {made.id: "running", stays.id: "created"}
            assert (await runtime.event(last, pod, ends.get(last))).ok
            assert served.phases() == {stays.id: "created"}


@each_version
async def test_events_nobody_subscribed_to_are_answered_all_the_same(folder: Path, flavour: Flavour) -> None:
    pod = nri.asking("1")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        for kind in set(nri.OWN_RPC) - {Event.START_CONTAINER}:  # that one is refused: nothing was granted
            assert (await runtime.event(kind, pod, nri.container(pod))).ok
        strange = pb.StateChangeEvent(event=99, pod=pod).SerializeToString()  # type: ignore[arg-type] # from the future
        assert (await runtime.call("StateChange", strange)).status.ok
