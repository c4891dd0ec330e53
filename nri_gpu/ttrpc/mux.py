"""NRI's ttrpc mux: several connections over one socket, each piece under eight bytes of header, big-endian.

```
 0               4        8
 | connection id | length | payload ...
```
No frame opens or closes a connection: both ids exist from the start. Source: containerd/nri pkg/net/multiplex/mux.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final, NewType, Self, TypeAlias

from nri_gpu.domain.errors import LocalProtocolError, OversizeError, RemoteProtocolError
from nri_gpu.ttrpc.connection import Connection, Role
from nri_gpu.ttrpc.frames import HEADER_BYTES as TTRPC_HEADER_BYTES
from nri_gpu.ttrpc.frames import NEED_DATA, RECEIVE_MAX, SEND_MAX, BytesLike, Incoming, NeedData, Outgoing

ConnId = NewType("ConnId", int)
PLUGIN_SERVICE: Final = ConnId(1)  # the plugin serves, the runtime calls
RUNTIME_SERVICE: Final = ConnId(2)  # the runtime serves, the plugin calls

HEADER: Final = Struct(">II")
HEADER_BYTES: Final = HEADER.size

# The runtime reads ttrpc through a 4096-byte buffer and drops the connection on a mux frame larger than what it is
# reading into; its queue holds 256 frames. So: one frame of at most 4096, then all the rest of the message in a second.
# containerd/nri pkg/net/multiplex/mux.go (Read, reader); containerd/ttrpc channel.go (newChannel).
FIRST_FRAME_MAX: Final = 4096  # bytes of payload

FRAME_SEND_MAX: Final = TTRPC_HEADER_BYTES + SEND_MAX  # bytes of payload; NRI 0.7 splits its own writes here
# NRI up to 0.6 writes frames of up to 16 MiB. The limit guards against bytes out of step, not against memory: payload
# is handed on as it comes.
FRAME_RECEIVE_MAX: Final = TTRPC_HEADER_BYTES + RECEIVE_MAX  # bytes of payload

Piece: TypeAlias = tuple[ConnId, bytearray]


def encode_message(conn_id: ConnId, message: bytes) -> bytes:
    """Return one ttrpc frame as the runtime can read it: in one mux frame, or in two.

    Raises LocalProtocolError when the second would be over FRAME_SEND_MAX; no frame of ttrpc/frames.py is.
    """
    if len(message) <= FIRST_FRAME_MAX:
        return HEADER.pack(conn_id, len(message)) + message
    rest = len(message) - FIRST_FRAME_MAX
    if rest > FRAME_SEND_MAX:
        raise LocalProtocolError(f"{len(message)} bytes are more than one ttrpc message")
    view = memoryview(message)
    first, second = HEADER.pack(conn_id, FIRST_FRAME_MAX), HEADER.pack(conn_id, rest)
    return b"".join((first, view[:FIRST_FRAME_MAX], second, view[FIRST_FRAME_MAX:]))


class MuxDecoder:
    """Bytes in, pieces of connections' streams out, in wire order. Holds only what it was fed and not yet asked for."""

    __slots__ = ("_buffer", "_conn_id", "_remaining")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._conn_id = ConnId(0)
        self._remaining = 0  # payload bytes of the current frame still to come

    @property
    def between_frames(self) -> bool:
        """Return whether the mux could end here without loss."""
        return not (self._buffer or self._remaining)

    def receive_data(self, data: BytesLike) -> None:
        """Take the next bytes, however they are cut."""
        self._buffer += data

    def next_piece(self) -> Piece | NeedData:
        """Return what there is of the current frame. Raises OversizeError, now and for ever, past FRAME_RECEIVE_MAX."""
        while not self._remaining:  # more than once over an empty frame: legal, and nothing to hand on
            if len(self._buffer) < HEADER_BYTES:
                return NEED_DATA
            self._read_header()
        if not self._buffer:
            return NEED_DATA
        if len(self._buffer) <= self._remaining:
            piece, self._buffer = self._buffer, bytearray()
        else:
            piece = self._buffer[: self._remaining]
            del self._buffer[: self._remaining]
        self._remaining -= len(piece)
        return self._conn_id, piece

    def _read_header(self) -> None:
        conn_id, length = HEADER.unpack_from(self._buffer)
        if length > FRAME_RECEIVE_MAX:
            raise OversizeError(length, FRAME_RECEIVE_MAX)
        del self._buffer[:HEADER_BYTES]
        self._conn_id, self._remaining = conn_id, length


MuxEvent: TypeAlias = tuple[ConnId, Incoming]


class Mux:
    """Connections by id over one byte stream. Payload for an id that is not here is dropped, as the runtime does.

    A protocol error on one connection ends the mux: the protocol cannot close a single connection.
    """

    __slots__ = ("_cause", "_closing", "_connections", "_current", "_decoder")

    def __init__(self, connections: Mapping[ConnId, Connection]) -> None:
        self._connections = dict(connections)
        self._decoder = MuxDecoder()
        self._current: ConnId | None = None  # whose bytes came last and may hold more events
        self._closing: list[ConnId] | None = None  # after the end of input: who still needs a ConnectionClosed
        self._cause: str | None = None  # of death

    @classmethod
    def for_plugin(cls) -> Self:
        """Return the plugin's end of an NRI connection."""
        return cls({PLUGIN_SERVICE: Connection(Role.SERVER), RUNTIME_SERVICE: Connection(Role.CLIENT)})

    @classmethod
    def for_runtime(cls) -> Self:
        """Return the runtime's end of an NRI connection."""
        return cls({PLUGIN_SERVICE: Connection(Role.CLIENT), RUNTIME_SERVICE: Connection(Role.SERVER)})

    def __getitem__(self, conn_id: ConnId) -> Connection:
        """Return the connection, for its open streams, its next stream id and `forget`.

        Its bytes go through the mux.
        """
        return self._connections[conn_id]

    def receive_data(self, data: BytesLike) -> None:
        """Take the next bytes of the socket, however they are cut."""
        self._check_usable()
        self._decoder.receive_data(data)

    def receive_eof(self) -> None:
        """Note the end of the socket's input: each connection will give a ConnectionClosed."""
        self._check_usable()
        self._closing = list(self._connections)

    def next_event(self) -> MuxEvent | NeedData:
        """Return the next event and its connection's id, in wire order.

        Raises RemoteProtocolError if the bytes make no sense.
        """
        self._check_usable()
        try:
            while self._current is not None or self._advance():
                if self._current is not None:
                    event = self._connections[self._current].next_event()
                    if event is not NEED_DATA:
                        return self._current, event
                    self._current = None
        except RemoteProtocolError as error:
            self._cause = str(error)
            raise
        return NEED_DATA

    def feed(self, data: BytesLike) -> Iterator[MuxEvent]:
        """Take all the bytes now, give their events as they are asked for. An error comes after what preceded it."""
        self._check_usable()
        self._decoder.receive_data(data)
        return self.events()

    def events(self) -> Iterator[MuxEvent]:
        """Yield all events there are. What is left in it stays for the next call."""
        while (event := self.next_event()) is not NEED_DATA:
            yield event

    def send(self, conn_id: ConnId, event: Outgoing) -> bytes:
        """Return the bytes to write for this event, at once and in one piece. Raises as Connection.send."""
        self._check_usable()
        return encode_message(conn_id, self._connections[conn_id].send(event))

    def _check_usable(self) -> None:
        if self._cause is not None:
            raise LocalProtocolError(f"mux used after it broke: {self._cause}")

    def _advance(self) -> bool:
        """Give a connection its next bytes, or the end of input. Return False if there is nothing to give."""
        piece = self._decoder.next_piece()
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
        if not self._decoder.between_frames:
            raise RemoteProtocolError("socket closed in the middle of a mux frame")
        self._current = self._closing.pop(0)
        self._connections[self._current].receive_eof()
        return True
