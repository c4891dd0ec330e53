"""What happens on a ttrpc connection, as values. Received ones come out of `next_event`, sent ones go into `send`.

An event cannot be wrong: each checks itself when it is built, and raises LocalProtocolError.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NewType, TypeAlias

from msgspec import Struct

from nri_gpu.domain.errors import LocalProtocolError
from nri_gpu.ttrpc.status import OK, Status

StreamId = NewType("StreamId", int)  # one call of one connection; odd, chosen by the client, only ever grows
STREAM_ID_MAX: Final = 2**32 - 1

Metadata: TypeAlias = tuple[tuple[str, str], ...]  # pairs in wire order; a key may repeat
BytesLike: TypeAlias = bytes | bytearray | memoryview  # memoryviews of single bytes


class NeedData(Enum):
    """A sentinel as mypy understands it; use NEED_DATA."""

    NEED_DATA = "need data"


NEED_DATA: Final = NeedData.NEED_DATA  # no event yet: feed more bytes


class _Request(Struct, frozen=True):
    """A unary call.

    timeout_ns: nanoseconds left when it was written; 0 is no limit, negative is already late.
    payload: the method's own message, not decoded here.
    """

    stream_id: StreamId
    service: str
    method: str
    payload: bytes = b""
    timeout_ns: int = 0
    metadata: Metadata = ()

    def __post_init__(self) -> None:
        _check_stream_id(self.stream_id)


class RequestReceived(_Request, frozen=True):
    """A client calls us. Answer with one ResponseSent of the same stream."""


class RequestSent(_Request, frozen=True):
    """We call a server. Its end is one ResponseReceived of the same stream, or the connection's."""

    def __post_init__(self) -> None:
        _check_stream_id(self.stream_id)
        if not (self.service and self.method):
            raise LocalProtocolError("a request needs a service and a method")
        if not -(2**63) <= self.timeout_ns < 2**63:
            raise LocalProtocolError(f"timeout of {self.timeout_ns} ns does not fit 64 bits")


class ResponseReceived(Struct, frozen=True):
    """A call of ours ended.

    status: the server's; or RESOURCE_EXHAUSTED or INTERNAL from here, when its answer was too large or made no sense.
    """

    stream_id: StreamId
    status: Status
    payload: bytes = b""

    def __post_init__(self) -> None:
        _check_stream_id(self.stream_id)


class ResponseSent(Struct, frozen=True):
    """We answer a call: with a payload, or with an error status and none."""

    stream_id: StreamId
    payload: bytes = b""
    status: Status = OK

    def __post_init__(self) -> None:
        _check_stream_id(self.stream_id)
        if self.payload and not self.status.ok:
            # The Go server drops what a handler returned beside its error; showing both would be a contradiction.
            raise LocalProtocolError(f"a payload beside the error {self.status.code.name}")


class RequestRejected(Struct, frozen=True):
    """A client broke a rule in a way that concerns one stream only.

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
    """We stopped waiting for a call: timed out or cancelled. Nothing is sent; a late answer will be dropped."""

    stream_id: StreamId


class ConnectionClosed(Struct, frozen=True):
    """The peer ended the connection between two frames. Open calls will not be answered."""


Incoming: TypeAlias = RequestReceived | RequestRejected | ResponseReceived | ConnectionClosed
Outgoing: TypeAlias = RequestSent | ResponseSent | RequestRejected
StreamEvent: TypeAlias = (
    RequestReceived | RequestRejected | ResponseReceived | RequestSent | ResponseSent | CallForgotten
)


def _check_stream_id(stream_id: int) -> None:
    if not (stream_id & 1 and 0 < stream_id <= STREAM_ID_MAX):
        raise LocalProtocolError(f"stream id {stream_id} is not an odd number of 32 bits")
