"""Ways to cut and feed bytes, frames as nobody of ours sends them, and a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nri_gpu.ttrpc import (
    NEED_DATA,
    BytesLike,
    Connection,
    Incoming,
    Metadata,
    RequestSent,
    StreamId,
)
from nri_gpu.ttrpc.frames import HEADER

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
