from __future__ import annotations

from collections.abc import Callable

import pytest

from nri_gpu.ttrpc import (
    OK,
    LocalProtocolError,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    Status,
    StatusCode,
)
from tests.unit.ttrpc.helpers import stream

WRONG: dict[str, Callable[[], object]] = {
    "request on an even stream": lambda: RequestSent(stream(2), "s", "m"),
    "request past 32 bits": lambda: RequestSent(stream(2**32 + 1), "s", "m"),
    "received on an even stream": lambda: RequestReceived(stream(4), "s", "m"),
    "response on an even stream": lambda: ResponseSent(stream(2)),
    "answer on an even stream": lambda: ResponseReceived(stream(2), OK),
    "no service": lambda: RequestSent(stream(1), "", "m"),
    "no method": lambda: RequestSent(stream(1), "s", ""),
    "timeout past 64 bits": lambda: RequestSent(stream(1), "s", "m", timeout_ns=2**63),
    "payload beside an error": lambda: ResponseSent(stream(1), b"x", Status(StatusCode.INTERNAL)),
    "rejection without an error": lambda: RequestRejected(stream(2), OK),
}


@pytest.mark.parametrize("build", WRONG.values(), ids=WRONG)
def test_an_event_cannot_be_wrong(build: Callable[[], object]) -> None:
    with pytest.raises(LocalProtocolError):
        build()


def test_a_status_reads_as_a_line() -> None:
    assert str(Status(StatusCode.NOT_FOUND, "no such thing")) == "NOT_FOUND: no such thing"
    assert str(OK) == "OK"


@pytest.mark.parametrize("number", [17, 99, -1, 2**31 - 1])
def test_a_code_nobody_knows_is_an_error_all_the_same(number: int) -> None:
    assert Status.from_wire(number, "why") == Status(StatusCode.UNKNOWN, f"why (code {number})")
