from __future__ import annotations

from typing import cast

import pytest

from nri_gpu.ttrpc import OK, LocalProtocolError, RemoteProtocolError, RequestSent, Status, StatusCode
from nri_gpu.ttrpc.frame import METADATA_MAX, decode_request, decode_response, encode_request, encode_response
from tests.unit.ttrpc.helpers import stream

ONE = stream(1)


def test_an_empty_success_is_no_bytes_at_all() -> None:
    assert encode_response(OK, b"") == b""
    event = decode_response(ONE, b"")
    assert (event.status, event.payload) == (OK, b"")


@pytest.mark.parametrize(
    ("status", "payload", "wire"),
    [
        (OK, bytes.fromhex("10ce0c"), "12 03 10ce0c"),
        (Status(StatusCode.FAILED_PRECONDITION, "no"), b"", "0a06 0809 12026e6f"),
    ],
)
def test_golden_responses(status: Status, payload: bytes, wire: str) -> None:
    assert encode_response(status, payload) == bytes.fromhex(wire)
    event = decode_response(ONE, bytes.fromhex(wire))
    assert (event.status, event.payload) == (status, payload)


def test_a_status_of_ok_that_is_spelled_out_is_ok() -> None:
    assert decode_response(ONE, bytes.fromhex("0a00")).status.ok


@pytest.mark.parametrize("number", [17, 99, -1, 2**31 - 1])
def test_a_code_nobody_knows_is_an_error_all_the_same(number: int) -> None:
    status = Status.from_wire(number, "why")
    assert status.code is StatusCode.UNKNOWN
    assert str(number) in status.message


@pytest.mark.parametrize("wire", ["ff", "0a05", "12", "0a0208", "0a0412 02 ff"])
def test_bytes_that_are_no_response(wire: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a ttrpc response"):
        decode_response(ONE, bytes.fromhex(wire))


@pytest.mark.parametrize("wire", ["ff", "0a05", "1a", "0a01ff", "2a03 0a01ff"])
def test_bytes_that_are_no_request(wire: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a ttrpc request"):
        decode_request(ONE, bytes.fromhex(wire))


def test_no_bytes_are_an_empty_request() -> None:
    event = decode_request(ONE, b"")
    assert (event.service, event.method, event.payload, event.timeout_ns, event.metadata) == ("", "", b"", 0, ())


def test_timeouts_and_metadata_travel() -> None:
    metadata = (("containerd-namespace-ttrpc", "k8s.io"), ("twice", "a"), ("twice", "b"), ("", ""))
    event = decode_request(ONE, encode_request(RequestSent(ONE, "s", "m", b"p", -1, metadata)))
    assert (event.timeout_ns, event.metadata) == (-1, metadata)


def test_metadata_has_a_limit() -> None:
    assert len(decode_request(ONE, b"\x2a\x00" * METADATA_MAX).metadata) == METADATA_MAX
    with pytest.raises(RemoteProtocolError, match="1025 pairs"):
        decode_request(ONE, b"\x2a\x00" * (METADATA_MAX + 1))


def test_a_refusal_arrives_even_with_text_that_is_not_unicode() -> None:
    wire = encode_response(Status(StatusCode.NOT_FOUND, "no \udcff here"), b"")
    assert decode_response(ONE, wire).status == Status(StatusCode.NOT_FOUND, "no \\udcff here")


def test_a_request_with_text_that_is_not_unicode_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(RequestSent(ONE, "s", "m", metadata=(("key", "\udcff"),)))


def test_a_payload_that_is_not_bytes_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(RequestSent(ONE, "s", "m", cast("bytes", 5)))
    with pytest.raises(LocalProtocolError):
        encode_response(OK, cast("bytes", 5))
