from __future__ import annotations

import tracemalloc

import pytest

from nri_gpu.ttrpc import (
    NEED_DATA,
    OK,
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
    RequestRejected,
    ResponseReceived,
    ResponseSent,
    SendOversizeError,
    Status,
    StatusCode,
)
from nri_gpu.ttrpc.mux import HEADER, encode_message
from tests.unit.ttrpc.helpers import call, cuts, feed_mux, raw_frame, stream

ONE = stream(1)


def test_both_directions_at_once() -> None:
    plugin, runtime = Mux.for_plugin(), Mux.for_runtime()
    to_runtime = plugin.send(RUNTIME_SERVICE, call(1, b"register"))
    to_plugin = runtime.send(PLUGIN_SERVICE, call(1, b"configure"))
    [(conn_id, event)] = runtime.feed(to_runtime)
    assert (conn_id, isinstance(event, RequestReceived)) == (RUNTIME_SERVICE, True)
    to_plugin += runtime.send(RUNTIME_SERVICE, ResponseSent(ONE))
    events = list(plugin.feed(to_plugin))
    assert [conn_id for conn_id, _ in events] == [PLUGIN_SERVICE, RUNTIME_SERVICE]
    assert events[1][1] == ResponseReceived(ONE, OK)
    assert plugin[PLUGIN_SERVICE].open_streams == {1}


def test_events_come_in_wire_order_however_it_is_cut() -> None:
    runtime = Mux.for_runtime()
    wire = b"".join(runtime.send(PLUGIN_SERVICE, call(number, b"x" * number)) for number in (1, 3, 5))
    wire += encode_message(PLUGIN_SERVICE, raw_frame(2, 1)) + encode_message(PLUGIN_SERVICE, raw_frame(9, 1))
    expected = list(Mux.for_plugin().feed(wire))
    assert [event.stream_id for _, event in expected if not isinstance(event, ConnectionClosed)] == [1, 3, 5, 2, 9]
    for how, chunks in cuts(wire):
        assert feed_mux(Mux.for_plugin(), chunks) == expected, how


def test_several_messages_in_one_mux_frame_and_one_in_many() -> None:
    frames = raw_frame(1, 1) + raw_frame(3, 1)
    together = HEADER.pack(1, len(frames)) + frames
    apart = b"".join(HEADER.pack(1, 1) + frames[at : at + 1] for at in range(len(frames)))
    assert list(Mux.for_plugin().feed(together)) == list(Mux.for_plugin().feed(apart))


@pytest.mark.parametrize("conn_id", [0, 3, 2**32 - 1])
def test_payload_for_an_unknown_id_is_dropped(conn_id: int) -> None:
    plugin = Mux.for_plugin()
    assert list(plugin.feed(encode_message(ConnId(conn_id), b"\xff" * 5000))) == []
    assert len(list(plugin.feed(encode_message(PLUGIN_SERVICE, raw_frame(1, 1))))) == 1


def test_a_rejection_is_sent_as_it_is() -> None:
    plugin = Mux.for_plugin()
    [(conn_id, event)] = plugin.feed(encode_message(PLUGIN_SERVICE, raw_frame(2, 1)))
    assert isinstance(event, RequestRejected)
    assert plugin.send(conn_id, event)[8 + 4 : 8 + 10] == raw_frame(2, 2)[4:10]


def test_events_not_asked_for_stay() -> None:
    plugin = Mux.for_plugin()
    wire = encode_message(PLUGIN_SERVICE, raw_frame(1, 1) + raw_frame(3, 1))
    next(plugin.feed(wire))
    [(_, event)] = plugin.feed(b"")
    assert event == RequestReceived(stream(3), "", "")


def test_a_reply_too_large_can_still_be_answered() -> None:
    plugin = Mux.for_plugin()
    list(plugin.feed(encode_message(PLUGIN_SERVICE, raw_frame(1, 1))))
    with pytest.raises(SendOversizeError):
        plugin.send(PLUGIN_SERVICE, ResponseSent(ONE, bytes(SEND_MAX)))
    assert plugin.send(PLUGIN_SERVICE, ResponseSent(ONE, status=Status(StatusCode.INTERNAL, "too large")))


def test_an_error_ends_the_mux_after_what_came_before_it() -> None:
    plugin, found = Mux.for_plugin(), []
    wire = encode_message(PLUGIN_SERVICE, raw_frame(1, 1)) + HEADER.pack(1, 2**32 - 1)
    events = plugin.feed(wire)
    found.append(next(events))
    with pytest.raises(OversizeError):
        next(events)
    assert isinstance(found[0][1], RequestReceived)
    for use in (
        plugin.next_event,
        lambda: plugin.receive_data(b""),
        lambda: plugin.send(PLUGIN_SERVICE, ResponseSent(ONE)),
    ):
        with pytest.raises(LocalProtocolError, match="after it broke"):
            use()


def test_an_error_of_one_connection_is_the_mux() -> None:
    plugin = Mux.for_plugin()
    with pytest.raises(RemoteProtocolError):
        list(plugin.feed(encode_message(RUNTIME_SERVICE, raw_frame(1, 2, length=2**31))))
    with pytest.raises(LocalProtocolError, match="after it broke"):
        plugin.send(PLUGIN_SERVICE, ResponseSent(ONE))


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
