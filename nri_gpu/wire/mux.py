"""NRI's trunk: several byte streams over one socket, each piece under eight bytes of header, big-endian.

```
 0               4        8
 | connection id | length | payload ...
```
No frame opens or closes a connection: both ids exist from the start. Source: containerd/nri pkg/net/multiplex/mux.go.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NewType, TypeAlias

from nri_gpu.domain.errors import LocalProtocolError, OversizeError
from nri_gpu.wire.events import NEED_DATA, BytesLike, NeedData
from nri_gpu.wire.frame import HEADER_BYTES as TTRPC_HEADER_BYTES
from nri_gpu.wire.frame import RECEIVE_MAX, SEND_MAX

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
    """One ttrpc frame as the runtime can read it: in one mux frame, or in two.

    Raises LocalProtocolError when the second would be over FRAME_SEND_MAX; no frame of wire/frame.py is.
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
        """Whether the trunk could end here without loss."""
        return not (self._buffer or self._remaining)

    def whole_message(self, data: bytes) -> tuple[ConnId, bytes] | None:
        """What a read brought when it is one message as both sides write them, in one frame or in two.

        Nearly every read is: whoever calls waits for the answer. None: it is not, and nothing was taken.
        """
        size = len(data)
        if self._remaining or self._buffer or size < HEADER_BYTES:
            return None
        conn_id, length = HEADER.unpack_from(data)
        end = HEADER_BYTES + length
        if end == size:
            return conn_id, data[HEADER_BYTES:]
        second = end + HEADER_BYTES
        if second > size or HEADER.unpack_from(data, end) != (conn_id, size - second):
            return None
        return conn_id, data[HEADER_BYTES:end] + data[second:]

    def receive_data(self, data: BytesLike) -> None:
        """Takes the next bytes, however they are cut."""
        self._buffer += data

    def next_piece(self) -> Piece | NeedData:
        """What there is of the current frame. Raises OversizeError, now and for ever, past FRAME_RECEIVE_MAX."""
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
