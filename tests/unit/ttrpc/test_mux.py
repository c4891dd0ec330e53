from __future__ import annotations

import tracemalloc

import pytest

from nri_gpu.ttrpc import (
    NEED_DATA,
    PLUGIN_SERVICE,
    RUNTIME_SERVICE,
    SEND_MAX,
    ConnectionClosed,
    ConnId,
    LocalProtocolError,
    Mux,
    OversizeError,
    RemoteProtocolError,
    RequestReceived,
    ResponseSent,
)
from nri_gpu.ttrpc.mux import FIRST_FRAME_MAX, FRAME_RECEIVE_MAX, FRAME_SEND_MAX, HEADER, MuxDecoder, encode_message
from tests.unit.ttrpc.helpers import raw_frame, stream

CONN = ConnId(1)
ONE = stream(1)


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
    wire = encode_message(CONN, message[:total])
    assert frame_lengths(wire) == lengths
    decoder = MuxDecoder()
    decoder.receive_data(wire)
    assert streams(decoder) == {1: message[:total]}
    assert decoder.between_frames


def test_what_is_no_ttrpc_message_is_not_encoded() -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(CONN, bytes(FRAME_SEND_MAX + FIRST_FRAME_MAX + 1))


def test_a_piece_is_not_the_callers_buffer() -> None:
    decoder, chunk = MuxDecoder(), bytearray(encode_message(CONN, b"kept"))
    decoder.receive_data(chunk)
    chunk[:] = bytes(len(chunk))
    assert streams(decoder) == {1: b"kept"}


def test_a_length_out_of_reach_ends_it_for_ever() -> None:
    decoder = MuxDecoder()
    decoder.receive_data(HEADER.pack(9, FRAME_RECEIVE_MAX + 1))
    for _ in range(2):
        with pytest.raises(OversizeError):
            decoder.next_piece()


@pytest.mark.parametrize("conn_id", [0, 3, 2**32 - 1])
def test_payload_for_an_unknown_id_is_dropped(conn_id: int) -> None:
    plugin = Mux.for_plugin()
    assert list(plugin.feed(encode_message(ConnId(conn_id), b"\xff" * 5000))) == []
    assert len(list(plugin.feed(encode_message(PLUGIN_SERVICE, raw_frame(1, 1))))) == 1


@pytest.mark.parametrize(
    "wrong",
    [HEADER.pack(1, 2**32 - 1), encode_message(RUNTIME_SERVICE, raw_frame(1, 2, length=2**31))],
    ids=["of the mux", "of one connection"],
)
def test_an_error_ends_the_mux_after_what_came_before_it(wrong: bytes) -> None:
    plugin = Mux.for_plugin()
    events = plugin.feed(encode_message(PLUGIN_SERVICE, raw_frame(1, 1)) + wrong)
    assert isinstance(next(events)[1], RequestReceived)
    with pytest.raises(OversizeError):
        next(events)
    for use in (
        plugin.next_event,
        lambda: plugin.receive_data(b""),
        lambda: plugin.send(PLUGIN_SERVICE, ResponseSent(ONE)),
    ):
        with pytest.raises(LocalProtocolError, match="after it broke"):
            use()


def test_the_end_reaches_every_connection_once() -> None:
    plugin = Mux.for_plugin()
    plugin.receive_data(encode_message(PLUGIN_SERVICE, raw_frame(1, 1)))
    plugin.receive_eof()
    assert [(conn_id, type(event)) for conn_id, event in plugin.events()] == [
        (PLUGIN_SERVICE, RequestReceived),
        (PLUGIN_SERVICE, ConnectionClosed),
        (RUNTIME_SERVICE, ConnectionClosed),
    ]
    assert plugin.next_event() is NEED_DATA


@pytest.mark.parametrize(
    "wire",
    [b"\0", HEADER.pack(1, 5), HEADER.pack(7, 5) + b"1234", encode_message(PLUGIN_SERVICE, raw_frame(1, 1)[:-1])],
)
def test_the_end_inside_a_frame_is_the_peers_fault(wire: bytes) -> None:
    plugin = Mux.for_plugin()
    assert list(plugin.feed(wire)) == []
    plugin.receive_eof()
    with pytest.raises(RemoteProtocolError, match="in the middle"):
        plugin.next_event()


def test_a_flood_for_nobody_costs_no_memory() -> None:
    plugin, chunk = Mux.for_plugin(), bytes(65536)
    list(plugin.feed(HEADER.pack(9, 16 * 2**20)))
    tracemalloc.start()
    for _ in range(256):
        assert list(plugin.feed(chunk)) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(chunk)
