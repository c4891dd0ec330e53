"""Ways to feed bytes, a connection pair joined in memory, and short hands for hex and requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nri_gpu.ttrpc import (
    NEED_DATA,
    BytesLike,
    Connection,
    Incoming,
    Metadata,
    Mux,
    MuxEvent,
    Outgoing,
    RequestSent,
    Role,
    StreamId,
)
from nri_gpu.ttrpc.events import HEADER

SERVICE = "nri.pkg.api.v1alpha1.Plugin"


def stream(number: int) -> StreamId:
    return StreamId(number)


def raw_frame(stream_id: int, frame_type: int, data: bytes = b"", flags: int = 0, length: int | None = None) -> bytes:
    """A frame as nobody of ours would send it. length: what the header claims, if not the truth."""
    return HEADER.pack(len(data) if length is None else length, stream_id, frame_type, flags) + data


def call(stream_id: int, payload: bytes = b"", timeout_ns: int = 0, metadata: Metadata = ()) -> RequestSent:
    return RequestSent(stream(stream_id), SERVICE, "CreateContainer", payload, timeout_ns, metadata)


def cuts(data: bytes) -> Iterator[tuple[str, Sequence[bytes]]]:
    """The same bytes: whole, a byte at a time, and with every single cut in two."""
    yield "whole", [data]
    yield "a byte at a time", [data[at : at + 1] for at in range(len(data))]
    for at in range(1, min(len(data), 64)):
        yield f"cut at {at}", [data[:at], data[at:]]


def drain(connection: Connection) -> list[Incoming]:
    events = []
    while (event := connection.next_event()) is not NEED_DATA:
        events.append(event)
    return events


def feed(connection: Connection, chunks: Sequence[BytesLike]) -> list[Incoming]:
    events = []
    for chunk in chunks:
        connection.receive_data(chunk)
        events += drain(connection)
    return events


def feed_mux(mux: Mux, chunks: Sequence[BytesLike]) -> list[MuxEvent]:
    return [event for chunk in chunks for event in mux.feed(chunk)]


@dataclass
class ConnectionPair:
    """A client and a server in memory: what one sends, the other has read when `send` returns."""

    client: Connection = field(default_factory=lambda: Connection(Role.CLIENT))
    server: Connection = field(default_factory=lambda: Connection(Role.SERVER))

    def send(self, role: Role, event: Outgoing) -> list[Incoming]:
        sender, receiver = self.client, self.server
        if role is Role.SERVER:
            sender, receiver = receiver, sender
        return feed(receiver, [sender.send(event)])
