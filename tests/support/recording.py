"""Recorded sessions as text, and their replay.

A recording opens with comment lines on where it is from. Then each line is one write of one side: `<` from the runtime,
`>` from the plugin, hex with blanks anywhere, a comment after `#`. An indented line goes on with the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from nri_gpu.ttrpc import (
    ConnectionClosed,
    Incoming,
    Mux,
    MuxEvent,
    Outgoing,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
)

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "wire"


class Write(Struct, frozen=True):
    """What one side wrote. from_runtime: which side. line: 1-based, of its first line."""

    from_runtime: bool
    data: bytes
    comment: str
    line: int


class Recording(Struct, frozen=True):
    """header: the opening comment, without its marks."""

    header: str
    writes: tuple[Write, ...]


def recordings() -> list[Path]:
    return sorted(FOLDER.glob("*.session"))


def parse(text: str) -> Recording:
    header: list[str] = []
    writes: list[Write] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content, _, comment = line.partition("#")
        if not content.strip():
            header += [comment.strip()] if comment and not writes else []
        elif content[0] in "<>":
            writes.append(Write(content[0] == "<", bytes.fromhex(content[1:]), comment.strip(), number))
        elif content[0].isspace() and writes:
            last = writes.pop()
            joined = f"{last.comment} {comment.strip()}".strip()
            writes.append(Write(last.from_runtime, last.data + bytes.fromhex(content), joined, last.line))
        else:
            raise ValueError(f"line {number}: neither <, > nor the rest of one")
    if not header:
        raise ValueError("a recording says first where it is from")
    return Recording("\n".join(header), tuple(writes))


def as_sent(event: Incoming) -> Outgoing:
    """What the other side sent when this is what arrived."""
    match event:
        case RequestReceived():
            return RequestSent(
                event.stream_id, event.service, event.method, event.payload, event.timeout_ns, event.metadata
            )
        case ResponseReceived():
            return ResponseSent(event.stream_id, event.payload, event.status)
        case RequestRejected() | ConnectionClosed():
            raise AssertionError(f"no well-behaved peer causes {event}")


def replay(recording: Recording) -> Iterator[tuple[Write, list[MuxEvent], bytes]]:
    """Both ends at once: what each write reads as, and what its sender writes when we are the sender."""
    plugin, runtime = Mux.for_plugin(), Mux.for_runtime()
    for write in recording.writes:
        sender, receiver = (runtime, plugin) if write.from_runtime else (plugin, runtime)
        events = list(receiver.feed(write.data))
        yield write, events, b"".join(sender.send(conn_id, as_sent(event)) for conn_id, event in events)
