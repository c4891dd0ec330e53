"""From a request to its answer: what is late, what is broken, and that nothing ever stays unanswered."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri import status
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.service import MARGIN_NS, PLUGIN, PluginService
from nri_gpu.ttrpc import RequestReceived, ResponseSent, Status, StatusCode, StreamId
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import NRI_0_6, NRI_0_8, Flavour
from tests.support.plugin import Bench

SECOND = 1_000_000_000


def request(method: str = "CreateContainer", payload: bytes = b"", timeout_ns: int = 2 * SECOND) -> RequestReceived:
    return RequestReceived(StreamId(7), PLUGIN, method, payload, timeout_ns)


def service(outcome: bytes | Status | Exception = b"", flavour: Flavour = NRI_0_6) -> PluginService:
    """Configured; what it answers to CreateContainer is given, or raised."""

    def create_container(_: bytes) -> bytes | Status:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    bench = Bench()
    bench.plugin.create_container = create_container  # type: ignore[method-assign,assignment] # a plugin with a bug
    made = PluginService(bench.plugin, lambda _: None, lambda: None, Sizes(lambda: 0, bench.later))
    assert made.answer(request("Configure", nri.configure(flavour))).status.ok
    return made


def answer(
    outcome: bytes | Status | Exception, asked: RequestReceived | None = None, waited_ns: int = 0
) -> ResponseSent:
    return service(outcome).answer(asked or request(), waited_ns)


def test_a_payload_goes_back_on_its_stream() -> None:
    assert answer(b"done") == ResponseSent(StreamId(7), b"done")


def test_a_refusal_is_a_status_and_no_line_in_the_log(log: Log) -> None:
    refusal = Status(StatusCode.PERMISSION_DENIED, "no")
    assert answer(refusal) == ResponseSent(StreamId(7), status=refusal)
    assert log.lines == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DecodeError("Error parsing message"), status.MALFORMED),
        (RemoteProtocolError("event came while the session was closed"), None),
        (KeyError("secret"), status.INTERNAL),
        (RecursionError(), status.INTERNAL),
        (MemoryError(), status.INTERNAL),
    ],
)
def test_what_a_handler_raises_becomes_a_status(log: Log, raised: Exception, expected: Status | None) -> None:
    given = answer(raised).status
    if expected is None:
        assert given.code is StatusCode.FAILED_PRECONDITION
        assert "event came while the session was closed" in given.message
    else:
        assert given == expected
    (line,) = log.lines
    assert line.level == ("ERROR" if given is status.INTERNAL else "WARNING")
    assert line.fields["method"] == "CreateContainer"
    assert line.fields["stream_id"] == 7


def test_a_bug_leaves_its_traceback_and_tells_the_client_nothing(log: Log) -> None:
    given = answer(ValueError("/etc/shadow")).status
    assert given.code is StatusCode.INTERNAL
    assert "shadow" not in given.message
    assert isinstance(log.one("bug in a handler").exception, ValueError)


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
    assert given.status == (status.LATE if late else status.INTERNAL)
    assert len(log.warnings()) == 1


@pytest.mark.parametrize(("own_ns", "late"), [(0, True), (60 * SECOND, False), (SECOND, True)])
def test_a_request_without_a_time_of_its_own_has_the_runtimes(log: Log, own_ns: int, late: bool) -> None:
    given = service(flavour=NRI_0_8).answer(request(timeout_ns=own_ns), 2 * SECOND)
    assert (given.status == status.LATE) is late
    assert len(log.warnings()) == late


def test_unknown_methods_and_services_are_not_worth_a_line(log: Log) -> None:
    """Newer runtimes try methods we do not have, for each event of each container."""
    assert answer(b"", request("Dance")).status == Status(StatusCode.UNIMPLEMENTED, "method Dance")
    other = RequestReceived(StreamId(1), "b.Service", "Do")
    assert answer(b"", other).status == Status(StatusCode.UNIMPLEMENTED, "service b.Service")
    assert log.warnings() == []


def test_no_status_of_ours_is_resource_exhausted() -> None:
    """In Synchronize the runtime reads that code as a message that was too big, and sends it again in parts."""
    ours = [value for value in vars(status).values() if isinstance(value, Status)]
    assert len(ours) >= 3
    assert all(each.code is not StatusCode.RESOURCE_EXHAUSTED and each.message for each in ours)
