"""Frames, and the messages in them: read however they are cut, and what can be neither read nor written."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from nri_gpu.ttrpc import (
    NEED_DATA,
    OK,
    RESPONSE_MAX,
    SEND_MAX,
    LocalProtocolError,
    OversizeError,
    RemoteProtocolError,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    SendOversizeError,
    Status,
    StatusCode,
)
from nri_gpu.ttrpc.frames import (
    DISCARD_MAX,
    METADATA_MAX,
    Frame,
    FrameDecoder,
    FrameType,
    decode_request,
    decode_response,
    encode_frame,
    encode_request,
    encode_response,
)
from tests.unit.ttrpc.helpers import cuts, raw_frame, stream

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


ONE = stream(1)
CASES = {
    "the reply to RegisterPlugin": (bytes.fromhex("00000000 00000001 02 00"), Frame(ONE, 2, 0, b"")),
    "data": (bytes.fromhex("00000003 00000007 01 00 616263"), Frame(stream(7), 1, 0, b"abc")),
    "an unknown type and all flags": (
        bytes.fromhex("00000001 ffffffff fe ff 00"),
        Frame(stream(2**32 - 1), 254, 255, b"\0"),
    ),
}


@pytest.mark.parametrize(("wire", "frame"), CASES.values(), ids=CASES)
def test_a_frame_is_read_however_it_is_cut(wire: bytes, frame: Frame) -> None:
    for how, chunks in cuts(wire):
        decoder = FrameDecoder()
        for chunk in chunks[:-1]:
            decoder.receive_data(chunk)
            assert decoder.next_frame() is NEED_DATA, how
            assert not decoder.between_frames
        decoder.receive_data(chunks[-1])
        assert decoder.next_frame() == frame, how
        assert decoder.next_frame() is NEED_DATA
        assert decoder.between_frames


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview])
def test_oversize_data_is_thrown_away_as_it_comes(
    convert: type[bytes] | type[bytearray] | type[memoryview],
) -> None:
    wire = raw_frame(1, 1, b"x" * 100, flags=3)
    for how, chunks in cuts(wire):
        decoder, found = FrameDecoder(limit=99), []
        for chunk in [*chunks, raw_frame(3, 2, b"y" * 99)]:
            decoder.receive_data(convert(chunk))
            while (frame := decoder.next_frame()) is not NEED_DATA:
                found.append(frame)
        assert found == [Frame(ONE, 1, 3, b"", 100), Frame(stream(3), 2, 0, b"y" * 99)], how


def test_bytes_out_of_step_end_it_for_ever() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(b"HTTP/1.1 400 Bad Request\r\n")
    for _ in range(2):
        with pytest.raises(OversizeError) as caught:
            decoder.next_frame()
    assert caught.value.length == int.from_bytes(b"HTTP", "big")
    longest = FrameDecoder()
    longest.receive_data(raw_frame(1, 1, length=DISCARD_MAX))
    assert longest.next_frame() == Frame(ONE, 1, 0, b"", DISCARD_MAX)
    assert not longest.between_frames


def test_nothing_over_four_mib_is_encoded() -> None:
    assert len(encode_frame(ONE, FrameType.REQUEST, bytes(SEND_MAX))) == SEND_MAX + 10
    with pytest.raises(SendOversizeError, match="4194305 bytes is over the limit of 4194304") as caught:
        encode_frame(ONE, FrameType.REQUEST, bytes(SEND_MAX + 1))
    assert (caught.value.length, caught.value.limit) == (SEND_MAX + 1, SEND_MAX)
    assert len(encode_response(OK, bytes(RESPONSE_MAX))) == SEND_MAX


@pytest.mark.parametrize(
    ("status", "payload", "wire"),
    [
        (OK, b"", ""),  # an empty success is no bytes at all
        (OK, bytes.fromhex("10ce0c"), "12 03 10ce0c"),
        (Status(StatusCode.FAILED_PRECONDITION, "no"), b"", "0a06 0809 12026e6f"),
    ],
)
def test_golden_responses(status: Status, payload: bytes, wire: str) -> None:
    assert encode_response(status, payload) == bytes.fromhex(wire)
    event = decode_response(ONE, bytes.fromhex(wire))
    assert (event.status, event.payload) == (status, payload)


@pytest.mark.parametrize("wire", ["ff", "0a05", "12", "0a0208", "0a0412 02 ff"])
def test_bytes_that_are_no_response(wire: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a ttrpc response"):
        decode_response(ONE, bytes.fromhex(wire))


@pytest.mark.parametrize("wire", ["ff", "0a05", "1a", "0a01ff", "2a03 0a01ff"])
def test_bytes_that_are_no_request(wire: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a ttrpc request"):
        decode_request(ONE, bytes.fromhex(wire))


def test_metadata_has_a_limit() -> None:
    assert decode_request(ONE, b"").metadata == ()
    assert len(decode_request(ONE, b"\x2a\x00" * METADATA_MAX).metadata) == METADATA_MAX
    with pytest.raises(RemoteProtocolError, match="1025 pairs"):
        decode_request(ONE, b"\x2a\x00" * (METADATA_MAX + 1))


def test_a_refusal_arrives_even_with_text_that_is_not_unicode() -> None:
    wire = encode_response(Status(StatusCode.NOT_FOUND, "no \udcff here"), b"")
    assert decode_response(ONE, wire).status == Status(StatusCode.NOT_FOUND, "no \\udcff here")


def test_what_cannot_be_encoded_is_our_fault() -> None:
    no_bytes = cast("bytes", 5)
    with pytest.raises(LocalProtocolError, match="request cannot be encoded"):
        encode_request(RequestSent(ONE, "s", "m", metadata=(("key", "\udcff"),)))
    with pytest.raises(LocalProtocolError, match="request cannot be encoded"):
        encode_request(RequestSent(ONE, "s", "m", no_bytes))
    with pytest.raises(LocalProtocolError, match="response cannot be encoded"):
        encode_response(OK, no_bytes)
