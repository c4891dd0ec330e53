from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.ttrpc import (
    NEED_DATA,
    OK,
    SEND_MAX,
    Connection,
    ConnectionClosed,
    Incoming,
    LocalProtocolError,
    OversizeError,
    RemoteProtocolError,
    RequestReceived,
    RequestRejected,
    ResponseReceived,
    ResponseSent,
    Role,
    SendOversizeError,
    Status,
    StatusCode,
)
from nri_gpu.ttrpc.connection import Streams
from nri_gpu.ttrpc.frames import encode_request
from tests.support.recording import parse, recordings, replay
from tests.unit.ttrpc.helpers import call, cuts, drain, feed, raw_frame, stream

ONE = stream(1)
BODY = encode_request(call(1, b"body"))
GOOD = raw_frame(1, 1, BODY)


def server(receive_limit: int = 1000, open_limit: int = 2) -> Connection:
    return Connection(Role.SERVER, receive_limit=receive_limit, open_limit=open_limit)


def waiting_client() -> Connection:
    client = Connection(Role.CLIENT, receive_limit=1000)
    client.send(call(1))
    return client


REJECTED = {
    "an even id": (raw_frame(2, 1, BODY), 2, StatusCode.INVALID_ARGUMENT),
    "stream zero": (raw_frame(0, 1, BODY), 0, StatusCode.INVALID_ARGUMENT),
    "not a protobuf": (raw_frame(1, 1, b"\xff"), 1, StatusCode.INVALID_ARGUMENT),
    "a stream whose client has closed": (raw_frame(1, 1, BODY, flags=1), 1, StatusCode.UNIMPLEMENTED),
    "a stream with more to come": (raw_frame(1, 1, BODY, flags=2), 1, StatusCode.UNIMPLEMENTED),
    "a flag nobody knows": (raw_frame(1, 1, BODY, flags=0x80), 1, StatusCode.UNIMPLEMENTED),
    "over the limit": (raw_frame(1, 1, bytes(1001)), 1, StatusCode.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize(("wire", "number", "code"), REJECTED.values(), ids=REJECTED)
def test_a_fault_of_one_stream_is_rejected_and_the_connection_stays(wire: bytes, number: int, code: StatusCode) -> None:
    for how, chunks in cuts(wire):
        connection = server()
        [event] = feed(connection, chunks)
        assert isinstance(event, RequestRejected), how
        assert (event.stream_id, event.status.code) == (number, code)
        assert connection.open_streams == frozenset()
        assert connection.send(event)[4:10] == raw_frame(number, 2)[4:10]
        assert isinstance(feed(connection, [raw_frame(5, 1, BODY)])[0], RequestReceived)


@pytest.mark.parametrize("case", ["not a protobuf", "a stream with more to come", "over the limit"])
def test_a_rejected_id_counts_as_used(case: str) -> None:
    connection = server()
    feed(connection, [REJECTED[case][0]])
    [event] = feed(connection, [GOOD])
    assert isinstance(event, RequestRejected)
    assert "used before" in event.status.message


@pytest.mark.parametrize("number", [1, 3, 5])
def test_an_id_is_not_used_twice_and_may_not_go_back(number: int) -> None:
    connection = server(open_limit=9)
    feed(connection, [raw_frame(5, 1, BODY)])
    [event] = feed(connection, [raw_frame(number, 1, BODY)])
    assert isinstance(event, RequestRejected)
    assert event.status.code is StatusCode.INVALID_ARGUMENT
    connection.send(event)
    assert connection.open_streams == {5}  # the first request is still there, and still to be answered
    connection.send(ResponseSent(stream(5)))


def test_too_many_open_requests_are_rejected_until_one_is_answered() -> None:
    connection = server(open_limit=2)
    events = feed(connection, [raw_frame(number, 1, BODY) for number in (1, 3, 5)])
    assert [type(event) for event in events] == [RequestReceived, RequestReceived, RequestRejected]
    connection.send(ResponseSent(ONE))
    assert isinstance(feed(connection, [raw_frame(7, 1, BODY)])[0], RequestReceived)


IGNORED_BY_SERVER = {
    "a response": raw_frame(1, 2, b"x"),
    "data of an unknown stream": raw_frame(9, 3, b"x"),
    "data after a rejected stream": raw_frame(1, 3, b"x", flags=1),
    "type 255": raw_frame(1, 255, b"x", flags=255),
    "oversize data": raw_frame(1, 3, bytes(1001)),
}


@pytest.mark.parametrize("wire", IGNORED_BY_SERVER.values(), ids=IGNORED_BY_SERVER)
def test_what_a_server_ignores(wire: bytes) -> None:
    connection = server()
    [event] = feed(connection, [wire, GOOD])
    assert isinstance(event, RequestReceived)
    assert feed(connection, [wire]) == []  # with a stream open, too
    assert connection.open_streams == {1}


FAILED_CALLS = {
    "an undecodable answer": (raw_frame(1, 2, b"\xff"), StatusCode.INTERNAL),
    "data instead of a response": (raw_frame(1, 3, b"x"), StatusCode.INTERNAL),
    "a request instead of a response": (raw_frame(1, 1), StatusCode.INTERNAL),
    "an answer over the limit": (raw_frame(1, 2, bytes(1001)), StatusCode.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize(("wire", "code"), FAILED_CALLS.values(), ids=FAILED_CALLS)
def test_an_answer_that_makes_no_sense_fails_its_call_alone(wire: bytes, code: StatusCode) -> None:
    client = waiting_client()
    client.send(call(3))
    events = feed(client, [wire, raw_frame(3, 2)])
    assert isinstance(events[0], ResponseReceived)
    assert events[0].status.code is code
    assert events[1:] == [ResponseReceived(stream(3), OK)]


@pytest.mark.parametrize("number", [0, 2, 3, 2**32 - 1])
def test_a_client_drops_frames_of_streams_it_does_not_know(number: int) -> None:
    assert feed(waiting_client(), [raw_frame(number, 2, b"\xff")]) == []


def test_answer_and_timeout_may_meet_and_what_comes_later_is_dropped() -> None:
    client = waiting_client()
    assert len(feed(client, [raw_frame(1, 2), raw_frame(1, 2)])) == 1
    client.forget(ONE)
    late = waiting_client()
    late.forget(ONE)
    assert late.open_streams == frozenset()
    for connection in (client, late):
        assert feed(connection, [raw_frame(1, 2)]) == []
        assert connection.next_stream_id == 3


@pytest.mark.parametrize("role", Role)
def test_a_message_over_four_mib_changes_nothing(role: Role) -> None:
    connection, big = Connection(role), bytes(SEND_MAX)
    if role is Role.SERVER:
        feed(connection, [GOOD])
    with pytest.raises(SendOversizeError) as caught:
        connection.send(call(1, big) if role is Role.CLIENT else ResponseSent(ONE, big))
    assert caught.value.length > caught.value.limit == SEND_MAX
    refusal = Status(StatusCode.RESOURCE_EXHAUSTED, str(caught.value))
    assert connection.send(call(1) if role is Role.CLIENT else ResponseSent(ONE, status=refusal))


def test_breaking_the_rules_ourselves_is_the_end() -> None:
    answered = server()
    feed(answered, [GOOD])
    answered.send(ResponseSent(ONE))
    for connection, event in (
        (answered, ResponseSent(ONE)),
        (server(), ResponseSent(ONE)),  # nobody asked
        (server(), call(1)),  # a server does not call
        (waiting_client(), call(1)),  # the same id again
        (waiting_client(), ResponseSent(ONE)),  # a client does not answer
        (waiting_client(), RequestRejected(ONE, Status(StatusCode.INTERNAL))),  # nor reject
    ):
        with pytest.raises(LocalProtocolError):
            connection.send(event)
        with pytest.raises(LocalProtocolError, match="after it broke"):
            connection.next_event()
        with pytest.raises(LocalProtocolError, match="after it broke"):
            connection.receive_data(b"")


def test_what_came_before_an_error_is_told_first() -> None:
    connection = server()
    connection.receive_data(GOOD + raw_frame(3, 1, length=2**32 - 1))
    assert isinstance(connection.next_event(), RequestReceived)
    with pytest.raises(OversizeError):
        connection.next_event()
    with pytest.raises(LocalProtocolError, match="after it broke"):
        connection.send(ResponseSent(ONE))


def test_the_end_between_frames_is_said_once() -> None:
    connection = server()
    connection.receive_data(GOOD)
    connection.receive_eof()
    events: list[Incoming] = drain(connection)
    assert [type(event) for event in events] == [RequestReceived, ConnectionClosed]
    assert connection.next_event() is NEED_DATA
    assert connection.send(ResponseSent(ONE))  # to a peer that only stopped writing


@pytest.mark.parametrize("wire", [GOOD[:1], GOOD[:10], GOOD[:-1], raw_frame(1, 1, bytes(1001))[:-1]])
def test_the_end_inside_a_frame_is_the_peers_fault(wire: bytes) -> None:
    connection = server()
    feed(connection, [wire])
    connection.receive_eof()
    with pytest.raises(RemoteProtocolError, match="in the middle"):
        connection.next_event()


def test_stream_ids_run_out_with_a_clear_error() -> None:
    client = Connection(Role.CLIENT)
    client.send(call(2**32 - 1))
    with pytest.raises(LocalProtocolError, match="not an odd number of 32 bits"):
        call(client.next_stream_id)


def test_memory_is_the_open_streams_only() -> None:
    streams = Streams(Role.SERVER)
    for number in range(1, 2001, 2):
        streams.move(stream(number), RequestReceived)
        streams.move(stream(number), ResponseSent)
    assert (len(streams), streams.open) == (0, frozenset())


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
def test_we_send_the_bytes_of_the_recording(path: Path) -> None:
    for write, _, ours in replay(parse(path.read_text())):
        assert ours == write.data, f"line {write.line}: {write.comment}"
