"""What happens on a ttrpc connection, as values. Received ones come out of `next_event`, sent ones go into `send`.

An event cannot be wrong: each checks itself when it is built, and raises LocalProtocolError.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NewType, Self, TypeAlias

from msgspec import Struct

from nri_gpu.domain.errors import LocalProtocolError

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
        """A peer's status. A number that gRPC does not know is UNKNOWN: it is an error all the same."""
        try:
            return cls(StatusCode(number), message)
        except ValueError:
            return cls(StatusCode.UNKNOWN, f"{message} (code {number})")

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.code is StatusCode.OK

    def __str__(self) -> str:
        """`FAILED_PRECONDITION: the sentence`."""
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
    """A client calls us. Answer with one ResponseSent of the same stream."""


class RequestSent(_Request, frozen=True):
    """We call a server. Its end is one ResponseReceived of the same stream, or the connection's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.service and self.method):
            raise LocalProtocolError("a request needs a service and a method")
        if not -(2**63) <= self.timeout_ns < 2**63:
            raise LocalProtocolError(f"timeout of {self.timeout_ns} ns does not fit 64 bits")


class ResponseReceived(_StreamEvent, frozen=True):
    """A call of ours ended.

    status: the server's; or RESOURCE_EXHAUSTED or INTERNAL from here, when its answer was too large or made no sense.
    """

    status: Status
    payload: bytes = b""


class ResponseSent(_StreamEvent, frozen=True):
    """We answer a call: with a payload, or with an error status and none."""

    payload: bytes = b""
    status: Status = OK

    def __post_init__(self) -> None:
        super().__post_init__()
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
