from __future__ import annotations

import pytest

from nri_gpu.ttrpc import LocalProtocolError, OversizeError
from nri_gpu.ttrpc.events import NEED_DATA
from nri_gpu.ttrpc.frame import (
    DISCARD_MAX,
    SEND_MAX,
    Frame,
    FrameDecoder,
    FrameType,
    SendOversizeError,
    encode_frame,
)
from tests.unit.ttrpc.helpers import cuts, raw_frame, stream

CASES = {
    "the reply to RegisterPlugin": (bytes.fromhex("00000000 00000001 02 00"), Frame(stream(1), 2, 0, b"")),
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


@pytest.mark.parametrize(("wire", "frame"), CASES.values(), ids=CASES)
def test_trailing_bytes_stay_for_the_next_frame(wire: bytes, frame: Frame) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(wire + wire[:5])
    assert decoder.next_frame() == frame
    assert decoder.next_frame() is NEED_DATA
    decoder.receive_data(wire[5:])
    assert decoder.next_frame() == frame


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview])
def test_any_bytes_like_chunk(convert: type[bytes] | type[bytearray] | type[memoryview]) -> None:
    decoder = FrameDecoder(limit=4)
    decoder.receive_data(convert(raw_frame(1, 1, b"toolong") + raw_frame(3, 1, b"ok")))
    assert decoder.next_frame() == Frame(stream(1), 1, 0, b"", 7)
    assert decoder.next_frame() == Frame(stream(3), 1, 0, b"ok")


def test_oversize_data_is_thrown_away_as_it_comes() -> None:
    wire = raw_frame(1, 1, b"x" * 100, flags=3)
    for how, chunks in cuts(wire):
        decoder, found = FrameDecoder(limit=99), []
        for chunk in [*chunks, raw_frame(3, 2)]:
            decoder.receive_data(chunk)
            while (frame := decoder.next_frame()) is not NEED_DATA:
                found.append(frame)
        assert found == [Frame(stream(1), 1, 3, b"", 100), Frame(stream(3), 2, 0, b"")], how


def test_the_limit_itself_is_allowed() -> None:
    decoder = FrameDecoder(limit=100)
    decoder.receive_data(raw_frame(1, 1, b"x" * 100))
    assert isinstance(decoder.next_frame(), Frame)


def test_bytes_out_of_step_end_it_for_ever() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(b"HTTP/1.1 400 Bad Request\r\n")
    for _ in range(2):
        with pytest.raises(OversizeError) as caught:
            decoder.next_frame()
    assert caught.value.length == int.from_bytes(b"HTTP", "big")


def test_an_oversize_frame_may_be_as_long_as_the_discard_limit() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(raw_frame(1, 1, length=DISCARD_MAX))
    frame = decoder.next_frame()
    assert isinstance(frame, Frame) and frame.oversize_bytes
    assert not decoder.between_frames


def test_nothing_over_four_mib_is_encoded() -> None:
    assert len(encode_frame(stream(1), FrameType.REQUEST, bytes(SEND_MAX))) == SEND_MAX + 10
    with pytest.raises(SendOversizeError, match="4194305 bytes is over the limit of 4194304") as caught:
        encode_frame(stream(1), FrameType.REQUEST, bytes(SEND_MAX + 1))
    assert (caught.value.length, caught.value.limit) == (SEND_MAX + 1, SEND_MAX)
    assert isinstance(caught.value, LocalProtocolError)
