"""The life of a stream, as a table for each role; what a connection remembers of its streams.

Two things do not fit a table of streams. A frame with an even id never has a stream: the connection rejects it before
it looks here. And closed streams are not remembered one by one: ids only grow, so one number separates old and new.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from nri_gpu.domain.errors import LocalProtocolError
from nri_gpu.ttrpc.events import (
    CallForgotten,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    StreamEvent,
    StreamId,
)


class Role(Enum):
    """Which end of a connection we are. The client is the side that opened it; inside a mux the id decides."""

    CLIENT = "client"
    SERVER = "server"


class StreamState(StrEnum):
    """Where a stream is in its life."""

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
        """Calls without an answer."""
        return frozenset(self._open)

    @property
    def next_id(self) -> StreamId:
        """The lowest id that a new stream can have."""
        return StreamId(self._last_id + 2)

    def __len__(self) -> int:
        """How many streams are open."""
        return len(self._open)

    def state(self, stream_id: StreamId) -> StreamState:
        """Where this stream is."""
        if stream_id in self._open:
            return StreamState.OPEN
        return StreamState.DONE if stream_id <= self._last_id else StreamState.IDLE

    def allows(self, stream_id: StreamId, event: type[StreamEvent]) -> bool:
        """Whether the table has a place for this event now."""
        return event in self._table[self.state(stream_id)]

    def move(self, stream_id: StreamId, event: type[StreamEvent]) -> None:
        """Takes one step. Raises LocalProtocolError when the table has none."""
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
