"""The whole wire of an NRI socket: a mux and the ttrpc connections it carries, as one object to feed and to drain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self, TypeAlias

from nri_gpu.domain.errors import LocalProtocolError, RemoteProtocolError
from nri_gpu.wire.connection import Connection
from nri_gpu.wire.events import NEED_DATA, BytesLike, Incoming, NeedData, Outgoing
from nri_gpu.wire.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, ConnId, MuxDecoder, encode_message
from nri_gpu.wire.state import Role

TrunkEvent: TypeAlias = tuple[ConnId, Incoming]


class Trunk:
    """Connections by id over one byte stream. Payload for an id that is not here is dropped, as the runtime does.

    An error of one connection is the trunk's: there is no way to end one alone that the peer would see.
    """

    __slots__ = ("_cause", "_closing", "_connections", "_current", "_mux")

    def __init__(self, connections: Mapping[ConnId, Connection]) -> None:
        self._connections = dict(connections)
        self._mux = MuxDecoder()
        self._current: ConnId | None = None  # whose bytes came last and may hold more events
        self._closing: list[ConnId] | None = None  # after the end of input: who is still to be told
        self._cause: str | None = None  # of death

    @classmethod
    def for_plugin(cls) -> Self:
        """The plugin's end of an NRI connection."""
        return cls({PLUGIN_SERVICE: Connection(Role.SERVER), RUNTIME_SERVICE: Connection(Role.CLIENT)})

    @classmethod
    def for_runtime(cls) -> Self:
        """The runtime's end of an NRI connection."""
        return cls({PLUGIN_SERVICE: Connection(Role.CLIENT), RUNTIME_SERVICE: Connection(Role.SERVER)})

    def __getitem__(self, conn_id: ConnId) -> Connection:
        """The connection, for its open streams, its next stream id and `forget`. Its bytes go through the trunk."""
        return self._connections[conn_id]

    def receive_data(self, data: BytesLike) -> None:
        """Takes the next bytes of the socket, however they are cut."""
        self._check_usable()
        self._mux.receive_data(data)

    def receive_eof(self) -> None:
        """Notes the end of the socket's input: each connection will say ConnectionClosed."""
        self._check_usable()
        self._closing = list(self._connections)

    def next_event(self) -> TrunkEvent | NeedData:
        """The next event and whose it is, in wire order. Raises RemoteProtocolError when the bytes make no sense."""
        self._check_usable()
        try:
            return self._next_event()
        except RemoteProtocolError as error:
            self._cause = str(error)
            raise

    def feed(self, data: BytesLike) -> Iterator[TrunkEvent]:
        """Takes all the bytes now, gives their events as they are asked for. An error comes after what preceded it."""
        self._check_usable()
        found = self._short_way(data) if isinstance(data, bytes) and self._current is None else None
        if found is not None:
            return iter(found)
        self._mux.receive_data(data)
        return self.events()

    def events(self) -> Iterator[TrunkEvent]:
        """All events there are. What is left in it stays for the next call."""
        while (event := self.next_event()) is not NEED_DATA:
            yield event

    def send(self, conn_id: ConnId, event: Outgoing) -> bytes:
        """The bytes to write for this event, at once and in one piece. Raises as Connection.send."""
        self._check_usable()
        return encode_message(conn_id, self._connections[conn_id].send(event))

    def _short_way(self, data: bytes) -> tuple[TrunkEvent, ...] | None:
        """The events of a read that is one whole message; None when it is not, and nothing was taken.

        A law in tests/property holds it to the long way. It takes a third of the time of a request that is passed.
        """
        if self._closing is not None or (whole := self._mux.whole_message(data)) is None:
            return None
        conn_id, message = whole
        connection = self._connections.get(conn_id)
        events = () if connection is None else connection.receive_whole(message)
        return None if events is None else tuple([(conn_id, event) for event in events])

    def _check_usable(self) -> None:
        if self._cause is not None:
            raise LocalProtocolError(f"trunk used after it broke: {self._cause}")

    def _next_event(self) -> TrunkEvent | NeedData:
        while True:
            if self._current is not None:
                event = self._connections[self._current].next_event()
                if event is not NEED_DATA:
                    return self._current, event
                self._current = None
            if not self._advance():
                return NEED_DATA

    def _advance(self) -> bool:
        """Gives a connection its next bytes, or word of the end. False when there is nothing to give."""
        piece = self._mux.next_piece()
        if piece is NEED_DATA:
            return self._close_next()
        conn_id, data = piece
        connection = self._connections.get(conn_id)
        if connection is not None:
            connection.receive_data(data)
            self._current = conn_id
        return True

    def _close_next(self) -> bool:
        if not self._closing:
            return False
        if not self._mux.between_frames:
            raise RemoteProtocolError("socket closed in the middle of a mux frame")
        self._current = self._closing.pop(0)
        self._connections[self._current].receive_eof()
        return True
