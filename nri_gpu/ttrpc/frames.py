"""The events on a ttrpc connection: as values, and as the bytes that carry them.

Received events come out of `next_event`, sent ones go into `send`. An event cannot be wrong: each checks itself when it
is built, and raises LocalProtocolError.

The bytes are frames: ten bytes of header, big-endian, then the data, which is a Request or a Response in protobuf.

```
 0        4           8      9       10
 | length | stream id | type | flags | data ...
```

Source: containerd/ttrpc PROTOCOL.md, channel.go, request.proto.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import Final, NamedTuple, NewType, Self, TypeAlias

from google.protobuf.message import DecodeError
from msgspec import Struct

from nri_gpu._pb import ttrpc_pb2
from nri_gpu.domain.errors import LocalProtocolError, OversizeError, RemoteProtocolError

StreamId = NewType("StreamId", int)  # one call of one connection; odd, chosen by the client, only ever grows
STREAM_ID_MAX: Final = 2**32 - 1

Metadata: TypeAlias = tuple[tuple[str, str], ...]  # pairs in wire order; a key may repeat
BytesLike: TypeAlias = bytes | bytearray | memoryview  # memoryviews of single bytes


class NeedData(Enum):
    """A sentinel as mypy understands it; use NEED_DATA."""

    NEED_DATA = "need data"


NEED_DATA: Final = NeedData.NEED_DATA  # no event yet: feed more bytes


class StatusCode(IntEnum):
    """gRPC's codes; ttrpc borrows them whole."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(Struct, frozen=True):
    """A code with its sentence; the sentence travels to whoever made the call."""

    code: StatusCode
    message: str = ""

    @classmethod
    def from_wire(cls, number: int, message: str) -> Self:
        """Return a peer's status. A number that gRPC does not know is UNKNOWN: it is an error all the same."""
        try:
            return cls(StatusCode(number), message)
        except ValueError:
            return cls(StatusCode.UNKNOWN, f"{message} (code {number})")

    @property
    def ok(self) -> bool:
        return self.code is StatusCode.OK

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


OK: Final = Status(StatusCode.OK)


class _StreamEvent(Struct, frozen=True):
    stream_id: StreamId

    def __post_init__(self) -> None:
        if not (self.stream_id & 1 and 0 < self.stream_id <= STREAM_ID_MAX):
            raise LocalProtocolError(f"stream id {self.stream_id} is not an odd number of 32 bits")


class _Request(_StreamEvent, frozen=True):
    """A unary call.

    timeout_ns: nanoseconds left when it was written; 0 is no limit, negative is already late.
    payload: the method's own message, not decoded here.
    """

    service: str
    method: str
    payload: bytes = b""
    timeout_ns: int = 0
    metadata: Metadata = ()


class RequestReceived(_Request, frozen=True):
    """A call of ours by a client. Answer with one ResponseSent of the same stream."""


class RequestSent(_Request, frozen=True):
    """A call of a server by us. Its end is one ResponseReceived of the same stream, or the connection's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.service and self.method):
            raise LocalProtocolError("a request needs a service and a method")
        if not -(2**63) <= self.timeout_ns < 2**63:
            raise LocalProtocolError(f"timeout of {self.timeout_ns} ns does not fit 64 bits")


class ResponseReceived(_StreamEvent, frozen=True):
    """The end of a call of ours.

    status: the server's; or RESOURCE_EXHAUSTED or INTERNAL from here, when its answer was too large or made no sense.
    """

    status: Status
    payload: bytes = b""


class ResponseSent(_StreamEvent, frozen=True):
    """Our answer to a call: a payload, or an error status without one."""

    payload: bytes = b""
    status: Status = OK

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.payload and not self.status.ok:
            # The Go server drops what a handler returned beside its error; showing both would be a contradiction.
            raise LocalProtocolError(f"a payload beside the error {self.status.code.name}")


class RequestRejected(Struct, frozen=True):
    """A client's breach of a rule that concerns one stream only.

    Hand it to `send` as it is: that is the answer. The stream id may be one which no stream can have.

    oversize_bytes: the length of a request over the receive limit; 0 for other breaches.
    """

    stream_id: StreamId
    status: Status
    oversize_bytes: int = 0

    def __post_init__(self) -> None:
        if self.status.ok:
            raise LocalProtocolError("a rejection needs an error")


class CallForgotten(Struct, frozen=True):
    """The end of our wait for a call: timed out or cancelled. Nothing is sent; a late answer will be dropped."""

    stream_id: StreamId


class ConnectionClosed(Struct, frozen=True):
    """The end of the connection by the peer, between two frames. Open calls will not be answered."""


Incoming: TypeAlias = RequestReceived | RequestRejected | ResponseReceived | ConnectionClosed
Outgoing: TypeAlias = RequestSent | ResponseSent | RequestRejected
StreamEvent: TypeAlias = (
    RequestReceived | RequestRejected | ResponseReceived | RequestSent | ResponseSent | CallForgotten
)

HEADER: Final = struct.Struct(">IIBB")
HEADER_BYTES: Final = HEADER.size

# What every ttrpc reader accepts, itself included; senders up to 1.2.5 did not check it. containerd/ttrpc channel.go.
SEND_MAX: Final = 4 * 1024 * 1024  # bytes of data
RESPONSE_MAX: Final = SEND_MAX - 5  # bytes of a response's payload, behind its field's tag and length

# More than the protocol asks: NRI up to 0.6 sends a node's whole Synchronize as one message, which its mux takes up to
# 16 MiB behind a first frame of 4 KiB. The rest of a larger one never comes (containerd/nri v0.6.1: mux.go).
RECEIVE_MAX: Final = 16 * 1024 * 1024 + 4096 - HEADER_BYTES  # bytes of data

# Data over the receive limit is read and thrown away, and its stream alone fails. Past this it is not a message that
# grew too large, it is bytes out of step: waiting for gigabytes that never come would look like a hang.
DISCARD_MAX: Final = 64 * 1024 * 1024  # bytes of data

# An empty pair is two bytes on the wire and a hundred in memory; callers send a handful (containerd one, tracing two).
METADATA_MAX: Final = 1024  # pairs


class SendOversizeError(LocalProtocolError):
    """A message of ours over the limit. Nothing was written, the connection and the stream are as before.

    length, limit: bytes.
    """

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"message of {length} bytes is over the limit of {limit}")
        self.length = length
        self.limit = limit


class FrameType(IntEnum):
    """The header's ninth byte. Peers may use others: ignore those."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3  # streaming only


class Frame(NamedTuple):
    """A frame. type: a FrameType, or a number nobody knows.

    oversize_bytes: the length of data over the receive limit, which is thrown away as it comes; else 0.
    """

    stream_id: StreamId
    type: int
    flags: int
    data: bytes
    oversize_bytes: int = 0


def encode_frame(stream_id: StreamId, frame_type: FrameType, data: bytes) -> bytes:
    """Return header and data. Raises SendOversizeError past SEND_MAX."""
    length = len(data)
    if length > SEND_MAX:
        raise SendOversizeError(length, SEND_MAX)
    return HEADER.pack(length, stream_id, frame_type, 0) + data


class FrameDecoder:
    """Bytes in, frames out. Holds at most one frame's data over what it was fed last."""

    __slots__ = ("_buffer", "_limit", "_skip")

    def __init__(self, limit: int = RECEIVE_MAX) -> None:
        self._limit = limit  # bytes of data
        self._buffer = bytearray()
        self._skip = 0  # bytes of an oversize frame still to come; the buffer is empty while there are any

    @property
    def between_frames(self) -> bool:
        """Return whether the stream could end here without loss."""
        return not (self._buffer or self._skip)

    def receive_data(self, data: BytesLike) -> None:
        """Take the next bytes, however they are cut."""
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        self._buffer += data

    def next_frame(self) -> Frame | NeedData:
        """Return the next frame. Raises OversizeError, now and for ever, at a length past DISCARD_MAX."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return NEED_DATA
        length, stream_id, frame_type, flags = HEADER.unpack_from(buffer)
        if length > self._limit:
            self._discard(length)
            return Frame(stream_id, frame_type, flags, b"", length)
        end = HEADER_BYTES + length
        if len(buffer) < end:
            return NEED_DATA
        with memoryview(buffer) as view:  # released before the buffer shrinks; slicing the bytearray would copy twice
            data = bytes(view[HEADER_BYTES:end])
        del buffer[:end]  # moves the start; CPython copies only when half is gone
        return Frame(stream_id, frame_type, flags, data)

    def _discard(self, length: int) -> None:
        if length > DISCARD_MAX:
            raise OversizeError(length, self._limit)
        end = HEADER_BYTES + length
        self._skip = max(0, end - len(self._buffer))
        del self._buffer[:end]


def encode_request(request: RequestSent) -> bytes:
    """Encode a Request. Raises LocalProtocolError for text that is not Unicode and values of a wrong type."""
    try:
        return ttrpc_pb2.Request(
            service=request.service,
            method=request.method,
            payload=request.payload,
            timeout_nano=request.timeout_ns,
            metadata=[ttrpc_pb2.KeyValue(key=key, value=value) for key, value in request.metadata],
        ).SerializeToString()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"request cannot be encoded: {error}") from error


def encode_response(status: Status, payload: bytes) -> bytes:
    """Encode a Response, empty for an empty success. Raises LocalProtocolError for a payload that is not bytes."""
    try:
        if status.ok:
            return ttrpc_pb2.Response(payload=payload).SerializeToString()
        # Text from the file system may hold what UTF-8 cannot. The refusal must arrive: silence starts the container.
        message = status.message.encode("utf-8", "backslashreplace").decode()
        wire_status = ttrpc_pb2.Status(code=status.code, message=message)
        return ttrpc_pb2.Response(status=wire_status).SerializeToString()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"response cannot be encoded: {error}") from error


def decode_request(stream_id: StreamId, data: bytes) -> RequestReceived:
    """Decode a Request. Raises RemoteProtocolError for bytes that are not one, and for more pairs than METADATA_MAX."""
    try:
        request = ttrpc_pb2.Request.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a ttrpc request: {error}") from error
    pairs = request.metadata
    if len(pairs) > METADATA_MAX:
        raise RemoteProtocolError(f"{len(pairs)} pairs of metadata are over the limit of {METADATA_MAX}")
    metadata = tuple((pair.key, pair.value) for pair in pairs) if pairs else ()
    return RequestReceived(stream_id, request.service, request.method, request.payload, request.timeout_nano, metadata)


def decode_response(stream_id: StreamId, data: bytes) -> ResponseReceived:
    """Decode a Response; zero bytes are an empty success. Raises RemoteProtocolError for bytes that are not one."""
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a ttrpc response: {error}") from error
    status = Status.from_wire(response.status.code, response.status.message) if response.HasField("status") else OK
    return ResponseReceived(stream_id, status, response.payload)
