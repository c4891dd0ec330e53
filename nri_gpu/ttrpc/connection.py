"""A ttrpc connection, client or server: bytes in, events out; events in, bytes out. No socket, no clock, no log.

The life of a stream is a table for each role. Two things do not fit it. A frame with an even id never has a stream: it
is rejected before the table is looked at. And closed streams are not remembered one by one: ids only grow, so one
number separates old and new.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from nri_gpu.domain.errors import LocalProtocolError, RemoteProtocolError
from nri_gpu.domain.text import counted
from nri_gpu.ttrpc.frames import (
    NEED_DATA,
    RECEIVE_MAX,
    BytesLike,
    CallForgotten,
    ConnectionClosed,
    Frame,
    FrameDecoder,
    FrameType,
    Incoming,
    NeedData,
    Outgoing,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    SendOversizeError,
    Status,
    StatusCode,
    StreamEvent,
    StreamId,
    decode_request,
    decode_response,
    encode_frame,
    encode_request,
    encode_response,
)

# Bounds what a client can make a server hold by asking and never waiting. A runtime asks one thing at a time; the
# limit is far above that, and far below what memory would notice.
OPEN_MAX: Final = 1024  # requests without an answer


class Role(Enum):
    """The end of a connection that we are. The client is the side that opened it; inside a mux the id decides."""

    CLIENT = "client"
    SERVER = "server"


class StreamState(StrEnum):
    """The point in its life where a stream is."""

    IDLE = "idle"  # its id is still to come
    OPEN = "open"
    DONE = "done"  # answered, forgotten, or its id was skipped


Table: TypeAlias = Mapping[StreamState, Mapping[type[StreamEvent], StreamState]]

SERVER: Final[Table] = {
    StreamState.IDLE: {RequestReceived: StreamState.OPEN, RequestRejected: StreamState.DONE},
    # Rejected while open: a second request of the same id.
    StreamState.OPEN: {ResponseSent: StreamState.DONE, RequestRejected: StreamState.OPEN},
    # A second answer is a missing key, hence LocalProtocolError.
    StreamState.DONE: {RequestRejected: StreamState.DONE},
}

CLIENT: Final[Table] = {
    StreamState.IDLE: {RequestSent: StreamState.OPEN},
    StreamState.OPEN: {ResponseReceived: StreamState.DONE, CallForgotten: StreamState.DONE},
    StreamState.DONE: {CallForgotten: StreamState.DONE},  # answer and timeout may meet in one turn of an event loop
}

TABLES: Final[Mapping[Role, Table]] = {Role.SERVER: SERVER, Role.CLIENT: CLIENT}


class Streams:
    """The streams of one connection. Its memory is the open ones and the highest id."""

    __slots__ = ("_last_id", "_open", "_table")

    def __init__(self, role: Role) -> None:
        self._table = TABLES[role]
        self._open: set[StreamId] = set()
        self._last_id = -1  # two before the first id

    @property
    def open(self) -> frozenset[StreamId]:
        return frozenset(self._open)

    @property
    def next_id(self) -> StreamId:
        """Return the lowest id that a new stream can have."""
        return StreamId(self._last_id + 2)

    def __len__(self) -> int:
        return len(self._open)

    def state(self, stream_id: StreamId) -> StreamState:
        if stream_id in self._open:
            return StreamState.OPEN
        return StreamState.DONE if stream_id <= self._last_id else StreamState.IDLE

    def allows(self, stream_id: StreamId, event: type[StreamEvent]) -> bool:
        """Return whether the table has a place for this event now."""
        return event in self._table[self.state(stream_id)]

    def move(self, stream_id: StreamId, event: type[StreamEvent]) -> None:
        """Take one step. Raises LocalProtocolError when the table has none."""
        state = self.state(stream_id)
        after = self._table[state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.__name__} on stream {stream_id}, which is {state.value}")
        if after is StreamState.OPEN:
            self._open.add(stream_id)
        else:
            self._open.discard(stream_id)
        if stream_id > self._last_id:
            self._last_id = stream_id


class Connection:
    """An end of a connection.

    Feed `receive_data`, drain `next_event` until NEED_DATA, write what `send` returns, in that order. After an error
    the connection is dead: using it again is a LocalProtocolError. The exception is SendOversizeError, which leaves all
    as it was.

    receive_limit: bytes of data in one frame; larger ones fail their stream. open_limit: requests served at a time.
    """

    __slots__ = ("_cause", "_closed", "_eof", "_frames", "_open_limit", "_role", "_streams")

    def __init__(self, role: Role, *, receive_limit: int = RECEIVE_MAX, open_limit: int = OPEN_MAX) -> None:
        self._role = role
        self._streams = Streams(role)
        self._frames = FrameDecoder(receive_limit)
        self._open_limit = open_limit
        self._eof = self._closed = False
        self._cause: str | None = None  # of death

    @property
    def open_streams(self) -> frozenset[StreamId]:
        """Return the calls still to be answered: by us as a server, by the peer as a client."""
        return self._streams.open

    @property
    def next_stream_id(self) -> StreamId:
        """Return the id that the next RequestSent carries.

        It is taken when that is sent, so send nothing in between.
        """
        return self._streams.next_id

    def receive_data(self, data: BytesLike) -> None:
        """Take the next bytes of the peer's stream, however they are cut."""
        self._check_usable()
        self._frames.receive_data(data)

    def receive_eof(self) -> None:
        """Note that the peer will send no more."""
        self._check_usable()
        self._eof = True

    def next_event(self) -> Incoming | NeedData:
        """Return the next thing that happened. Raises RemoteProtocolError if the bytes can no longer be understood."""
        self._check_usable()
        try:
            return self._next_event()
        except RemoteProtocolError as error:
            self._cause = str(error)
            raise

    def send(self, event: Outgoing) -> bytes:
        """Return the bytes to write for this event.

        Write them before asking for others: stream ids must arrive in order.

        Raises SendOversizeError before anything changed, LocalProtocolError for what the state does not allow.
        """
        self._check_usable()
        try:
            return self._write(event)
        except SendOversizeError:
            raise
        except LocalProtocolError as error:
            self._cause = str(error)
            raise

    def forget(self, stream_id: StreamId) -> None:
        """Stop waiting for a call of ours. The peer does not learn of it: ttrpc has no message for that."""
        self._streams.move(stream_id, CallForgotten)

    def _check_usable(self) -> None:
        if self._cause is not None:
            raise LocalProtocolError(f"connection used after it broke: {self._cause}")

    def _next_event(self) -> Incoming | NeedData:
        read = self._read_as_server if self._role is Role.SERVER else self._read_as_client
        while (frame := self._frames.next_frame()) is not NEED_DATA:
            event = read(frame)
            if event is not None:
                return event
        return self._end() if self._eof else NEED_DATA

    def _end(self) -> ConnectionClosed | NeedData:
        if not self._frames.between_frames:
            raise RemoteProtocolError("connection closed in the middle of a frame")
        if self._closed:
            return NEED_DATA  # ConnectionClosed comes once
        self._closed = True
        return ConnectionClosed()

    def _read_as_server(self, frame: Frame) -> Incoming | None:
        """Return a request, or why it is rejected.

        Responses, Data and unknown types are ignored, as every ttrpc server does.
        """
        if not frame.stream_id & 1:
            return _reject(
                frame, StatusCode.INVALID_ARGUMENT, f"stream id {frame.stream_id} is even: clients choose odd ones"
            )
        if frame.type != FrameType.REQUEST:
            return None
        event = self._read_request(frame)
        self._streams.move(event.stream_id, type(event))
        return event

    def _read_request(self, frame: Frame) -> RequestReceived | RequestRejected:
        if not self._streams.allows(frame.stream_id, RequestReceived):
            return _reject(
                frame, StatusCode.INVALID_ARGUMENT, f"stream id {frame.stream_id} was used before: ids must grow"
            )
        if frame.oversize_bytes:
            length = frame.oversize_bytes
            status = Status(StatusCode.RESOURCE_EXHAUSTED, f"request of {length} bytes is over the limit")
            return RequestRejected(frame.stream_id, status, length)
        if frame.flags:
            return _reject(frame, StatusCode.UNIMPLEMENTED, "streaming is not implemented")
        if len(self._streams) >= self._open_limit:
            return _reject(
                frame, StatusCode.RESOURCE_EXHAUSTED, f"{counted(len(self._streams), 'request')} waiting for an answer"
            )
        try:
            return decode_request(frame.stream_id, frame.data)
        except RemoteProtocolError as error:
            return _reject(frame, StatusCode.INVALID_ARGUMENT, str(error))

    def _read_as_client(self, frame: Frame) -> Incoming | None:
        """Return an answer to a call of ours. Drop frames of streams we do not know: late answers are among them."""
        if not self._streams.allows(frame.stream_id, ResponseReceived):
            return None
        event = _read_response(frame)
        self._streams.move(event.stream_id, ResponseReceived)
        return event

    def _write(self, event: Outgoing) -> bytes:
        """Encode first and move then, so that what cannot be sent changes nothing."""
        if isinstance(event, RequestSent):
            wire = encode_frame(event.stream_id, FrameType.REQUEST, encode_request(event))
            self._streams.move(event.stream_id, RequestSent)
        elif isinstance(event, ResponseSent):
            data = encode_response(event.status, event.payload)
            wire = encode_frame(event.stream_id, FrameType.RESPONSE, data)
            self._streams.move(event.stream_id, ResponseSent)
        else:  # the stream moved when the rejection was made
            if self._role is not Role.SERVER:
                raise LocalProtocolError("a client cannot reject")
            wire = encode_frame(event.stream_id, FrameType.RESPONSE, encode_response(event.status, b""))
        return wire


def _reject(frame: Frame, code: StatusCode, message: str) -> RequestRejected:
    return RequestRejected(frame.stream_id, Status(code, message))


def _read_response(frame: Frame) -> ResponseReceived:
    """Return the server's answer, or the status of its failure to give one."""
    if frame.oversize_bytes:
        status = Status(StatusCode.RESOURCE_EXHAUSTED, f"answer of {frame.oversize_bytes} bytes is over the limit")
    elif frame.type != FrameType.RESPONSE:
        status = Status(StatusCode.INTERNAL, f"answer of frame type {frame.type} to a unary call")
    else:
        try:
            return decode_response(frame.stream_id, frame.data)
        except RemoteProtocolError as error:
            status = Status(StatusCode.INTERNAL, str(error))
    return ResponseReceived(frame.stream_id, status)
