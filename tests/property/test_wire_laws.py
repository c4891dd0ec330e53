"""Laws of the wire: what is encoded is decoded, cutting changes nothing, garbage ends in one way, ids only grow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.ttrpc import (
    NEED_DATA,
    Connection,
    ConnId,
    Metadata,
    Mux,
    RequestReceived,
    RequestSent,
    ResponseSent,
    Role,
    Status,
    StatusCode,
    StreamId,
)
from nri_gpu.ttrpc.frames import (
    Frame,
    FrameDecoder,
    FrameType,
    decode_request,
    decode_response,
    encode_frame,
    encode_request,
    encode_response,
)
from nri_gpu.ttrpc.mux import MuxDecoder, encode_message
from tests.fuzz.fuzz_wire import ENDS, outcome
from tests.support.recording import as_sent
from tests.unit.ttrpc.helpers import raw_frame

stream_ids = st.integers(0, 2**31 - 1).map(lambda n: StreamId(2 * n + 1))
texts = st.text(st.characters(codec="utf-8"), max_size=40)
payloads = st.one_of(st.binary(max_size=200), st.integers(4000, 9000).map(bytes))
metadata: st.SearchStrategy[Metadata] = st.lists(st.tuples(texts, texts), max_size=5).map(tuple)
timeouts = st.integers(-(2**63), 2**63 - 1)
errors = st.builds(Status, st.sampled_from(list(StatusCode)[1:]), texts)
requests = st.builds(RequestSent, stream_ids, texts.filter(bool), texts.filter(bool), payloads, timeouts, metadata)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes, cut where the numbers fall."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


cut_lists = st.lists(st.integers(0, 2**16), max_size=12)


@given(requests)
def test_a_request_comes_out_as_it_went_in(request: RequestSent) -> None:
    assert as_sent(decode_request(request.stream_id, encode_request(request))) == request


@given(stream_ids, payloads)
def test_a_success_comes_out_as_it_went_in(stream_id: StreamId, payload: bytes) -> None:
    event = ResponseSent(stream_id, payload)
    assert as_sent(decode_response(stream_id, encode_response(event.status, payload))) == event


@given(stream_ids, errors)
def test_an_error_comes_out_as_it_went_in(stream_id: StreamId, status: Status) -> None:
    assert decode_response(stream_id, encode_response(status, b"")).status == status


@given(st.lists(st.tuples(stream_ids, st.sampled_from(FrameType), payloads), max_size=6), cut_lists)
def test_frames_come_out_as_they_went_in(frames: list[tuple[StreamId, FrameType, bytes]], cuts: list[int]) -> None:
    decoder, found = FrameDecoder(), []
    for chunk in chunked(b"".join(encode_frame(*frame) for frame in frames), cuts):
        decoder.receive_data(chunk)
        while (frame := decoder.next_frame()) is not NEED_DATA:
            found.append(frame)
    assert found == [Frame(stream_id, kind, 0, data) for stream_id, kind, data in frames]


@given(st.lists(st.tuples(st.integers(0, 3), payloads), max_size=6), cut_lists)
def test_streams_come_out_of_the_mux_as_they_went_in(messages: list[tuple[int, bytes]], cuts: list[int]) -> None:
    decoder, found = MuxDecoder(), dict.fromkeys(range(4), b"")
    for chunk in chunked(b"".join(encode_message(ConnId(n), data) for n, data in messages), cuts):
        decoder.receive_data(chunk)
        while (piece := decoder.next_piece()) is not NEED_DATA:
            found[piece[0]] += piece[1]
    assert found == {n: b"".join(data for conn, data in messages if conn == n) for n in range(4)}


def raw_frames() -> st.SearchStrategy[bytes]:
    """Frames that are mostly well formed, and wrong in places."""
    return st.builds(
        raw_frame,
        st.sampled_from([0, 1, 2, 3, 5, 7, 2**32 - 1]),
        st.sampled_from([0, 1, 1, 1, 2, 2, 3, 9]),
        st.one_of(st.binary(max_size=40), requests.map(encode_request), errors.map(lambda s: encode_response(s, b""))),
        st.sampled_from([0, 0, 0, 1, 2, 4, 255]),
        st.sampled_from([None, None, None, 3, 2**24, 2**32 - 1]),
    )


def wires() -> st.SearchStrategy[bytes]:
    """Byte streams that are mostly well formed, wrong in places, and sometimes nothing at all."""
    frames = raw_frames()
    framed = st.one_of(frames, st.builds(encode_message, st.integers(0, 3).map(ConnId), frames))
    return st.lists(st.one_of(framed, st.binary(max_size=30)), max_size=6).map(b"".join)


@given(st.sampled_from(sorted(ENDS)), st.one_of(wires(), st.binary()), cut_lists)
def test_cutting_changes_nothing_and_garbage_ends_in_one_way(target: str, data: bytes, cuts: list[int]) -> None:
    whole = outcome(target, [data])  # any other exception than RemoteProtocolError gets through, and fails
    assert outcome(target, chunked(data, cuts)) == whole
    assert outcome(target, [data[at : at + 1] for at in range(len(data))]) == whole


@given(st.lists(st.booleans(), max_size=40))
def test_ids_only_grow(answered: list[bool]) -> None:
    client, seen = Connection(Role.CLIENT), []
    for answer in answered:
        stream_id = client.next_stream_id
        client.send(RequestSent(stream_id, "s", "m"))
        seen.append(stream_id)
        if answer:
            client.receive_data(raw_frame(stream_id, FrameType.RESPONSE))
            client.next_event()
        else:
            client.forget(stream_id)
    assert seen == list(range(1, 2 * len(answered), 2))
    assert not client.open_streams


@given(st.lists(st.tuples(payloads, payloads), max_size=5), cut_lists)
def test_every_call_is_answered_over_a_mux(calls: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    plugin, runtime, conn = Mux.for_plugin(), Mux.for_runtime(), ConnId(1)
    asked = b"".join(
        runtime.send(conn, RequestSent(runtime[conn].next_stream_id, "s", "m", payload)) for payload, _ in calls
    )
    answers = b""
    for chunk in chunked(asked, cuts):
        for conn_id, event in plugin.feed(chunk):
            assert isinstance(event, RequestReceived)
            payload, reply = calls[event.stream_id // 2]
            assert event.payload == payload
            answers += plugin.send(conn_id, ResponseSent(event.stream_id, reply))
    replies = [as_sent(event) for chunk in chunked(answers, cuts) for _, event in runtime.feed(chunk)]
    assert replies == [ResponseSent(StreamId(2 * n + 1), reply) for n, (_, reply) in enumerate(calls)]
