from __future__ import annotations

import pytest

from nri_gpu.ttrpc import ConnId, LocalProtocolError, OversizeError
from nri_gpu.ttrpc.events import NEED_DATA
from nri_gpu.ttrpc.frame import SEND_MAX
from nri_gpu.ttrpc.mux import FIRST_FRAME_MAX, FRAME_RECEIVE_MAX, FRAME_SEND_MAX, HEADER, MuxDecoder, encode_message
from tests.unit.ttrpc.helpers import cuts

ONE, TWO = ConnId(1), ConnId(2)


def frame_lengths(wire: bytes) -> list[int]:
    lengths = []
    while wire:
        _, length = HEADER.unpack_from(wire)
        lengths.append(length)
        wire = wire[HEADER.size + length :]
    return lengths


def streams(decoder: MuxDecoder) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while (piece := decoder.next_piece()) is not NEED_DATA:
        found[piece[0]] = found.get(piece[0], b"") + piece[1]
    return found


@pytest.mark.parametrize(
    ("total", "lengths"),
    [
        (10, [10]),
        (4095, [4095]),
        (4096, [4096]),
        (4097, [4096, 1]),
        (100_000, [4096, 95_904]),
        (SEND_MAX + 10, [4096, SEND_MAX + 10 - 4096]),
    ],
)
def test_a_message_is_one_small_frame_and_one_rest(total: int, lengths: list[int]) -> None:
    message = bytes(range(256)) * (total // 256 + 1)
    wire = encode_message(ONE, message[:total])
    assert frame_lengths(wire) == lengths
    decoder = MuxDecoder()
    decoder.receive_data(wire)
    assert streams(decoder) == {1: message[:total]}
    assert decoder.between_frames


def test_what_is_no_ttrpc_message_is_not_encoded() -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(ONE, bytes(FRAME_SEND_MAX + FIRST_FRAME_MAX + 1))


def test_streams_are_told_apart_however_they_are_cut() -> None:
    wire = encode_message(ONE, b"one") + encode_message(TWO, b"two") + encode_message(ONE, b"more")
    for how, chunks in cuts(wire):
        decoder, found = MuxDecoder(), {1: b"", 2: b""}
        for chunk in chunks:
            decoder.receive_data(chunk)
            for conn_id, data in streams(decoder).items():
                found[conn_id] += data
        assert found == {1: b"onemore", 2: b"two"}, how


def test_payload_is_handed_on_as_it_comes() -> None:
    decoder = MuxDecoder()
    decoder.receive_data(HEADER.pack(1, FRAME_RECEIVE_MAX) + b"first")
    assert decoder.next_piece() == (ONE, bytearray(b"first"))
    assert decoder.next_piece() is NEED_DATA
    assert not decoder.between_frames
    decoder.receive_data(b"second")
    assert decoder.next_piece() == (ONE, bytearray(b"second"))


def test_empty_frames_hand_on_nothing() -> None:
    decoder = MuxDecoder()
    decoder.receive_data(HEADER.pack(1, 0) * 3 + HEADER.pack(2, 1) + b"x")
    assert streams(decoder) == {2: b"x"}


def test_a_piece_is_not_the_callers_buffer() -> None:
    decoder, chunk = MuxDecoder(), bytearray(encode_message(ONE, b"kept"))
    decoder.receive_data(chunk)
    chunk[:] = bytes(len(chunk))
    assert streams(decoder) == {1: b"kept"}


def test_a_length_out_of_reach_ends_it_for_ever() -> None:
    decoder = MuxDecoder()
    decoder.receive_data(HEADER.pack(9, FRAME_RECEIVE_MAX + 1))
    for _ in range(2):
        with pytest.raises(OversizeError):
            decoder.next_piece()
