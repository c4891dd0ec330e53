"""Logging, set up once: fixed phrases with fields, to stderr, and never in the way of a reply.

A log that blocks would hold the whole node: the runtime waits for us under one lock, and starts containers without
us when we are late. So a line is written only when that cannot block; when the reader of stderr stalls, some lines are
kept, the rest dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Final, Protocol

from nri_gpu.system.log import LEVELS, RECORDS, logger

# Every field that a line may carry, in the order in which they are printed. Nothing of a container's environment.
FIELDS: Final = (
    "decision", "code", "reason", "rule", "namespace", "pod_name", "container_name", "pod_uid", "container_id",
    "gpu_uuid", "mode", "generation", "method", "stream_id", "event", "runtime", "runtime_version", "nri_version",
    "socket", "path", "attempt", "gpus", "grants", "foreign", "ungranted", "waiting", "driver_version",
    "inventory_number", "inventory_age_s", "elapsed_ms", "deadline_ms", "parts", "payload_bytes", "fault", "resource",
    "dropped", "signal", "pid", "name", "index", "state", "before", "changes", "xid",
)  # fmt: skip
WAITING_LINES: Final = 1_000
PIPE_BUF: Final = 4096  # bytes
STDERR: Final = 2
JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
_PRIORITIES: Final = {"TRACE": 7, "DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_TRACEBACKS: Final = logging.Formatter()
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"'}


def set_up(level: str, *, journal: bool = False) -> None:
    """Send the log to stderr, or to the journal's socket when stderr is lost (launched by the runtime)."""
    sink = _Sink(_Journal() if journal and JOURNAL_SOCKET.exists() else _Stderr())
    sink.setLevel(LEVELS[level])
    RECORDS.handlers[:] = [sink]
    RECORDS.setLevel(LEVELS[level])
    logging.basicConfig(handlers=[_Borrowed()], level=logging.WARNING, force=True)
    atexit.register(sink.close)


class _Borrowed(logging.Handler):
    """What asyncio says of itself, by the same way: its own handler would write to stderr and may hang there."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line of ours for one of theirs."""
        bound = logger.opt(exception=record.exc_info[1] if record.exc_info else None).bind(fault=record.getMessage())
        bound.log(record.levelname, f"{record.name} has something to say")


class _Sink(logging.Handler):
    """Writes lines that can be written now, keeps some that cannot, and never waits.

    No thread: one that wakes for every line fights the event loop for the interpreter just when a reply is due.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line."""
        data = self._channel.encode(line_of(record), record)
        if len(self._waiting) < WAITING_LINES:
            self._waiting.append(data)
        else:
            self._dropped += 1
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting and self._channel.writable(0):
                rest = self._waiting[0][self._channel.write(self._waiting[0]) :]
                if rest:
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
                    self._tell_dropped()
        except OSError:  # nobody reads any more, and there is nowhere to say so
            self._waiting.clear()

    def _tell_dropped(self) -> None:
        if self._dropped and not self._waiting:
            self._waiting.append(self._channel.encode_plain(f"WARNING log lines lost dropped={self._dropped}\n"))
            self._dropped = 0

    def close(self) -> None:
        """Write what is kept, for a second at most."""
        super().close()
        deadline = time.monotonic() + 1
        while self._waiting and (left := deadline - time.monotonic()) > 0 and self._channel.writable(left):
            self._write()


class Channel(Protocol):
    """Where lines go."""

    def encode(self, text: str, record: logging.LogRecord) -> bytes:
        """A line as it is written here."""

    def encode_plain(self, text: str) -> bytes:
        """The same without a record."""

    def writable(self, timeout_s: float) -> bool:
        """Whether a write would not block, after waiting for timeout_s at most."""

    def write(self, data: bytes) -> int:
        """Write some of it. Returns how many bytes were taken. Raises: OSError."""


class _Stderr:
    """The descriptor itself: sys.stderr has locks and buffers of its own."""

    def __init__(self) -> None:
        # journald adds the time itself and says so by this variable (systemd.exec(5)).
        self._timed = "JOURNAL_STREAM" not in os.environ
        self._poll = select.poll()
        self._poll.register(STDERR, select.POLLOUT)

    def encode(self, text: str, record: logging.LogRecord) -> bytes:
        return self.encode_plain(f"{_clock(record.created)} {text}" if self._timed else text)

    def encode_plain(self, text: str) -> bytes:
        return text.encode(errors="backslashreplace")

    def writable(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1000))

    def write(self, data: bytes) -> int:
        # What poll calls writable takes this much at once, pipes and stream sockets alike (pipe(7), unix(7)).
        return os.write(STDERR, data[:PIPE_BUF])


class _Journal:
    """The journal's native protocol: one datagram of NAME=value lines (systemd.journal-fields(7))."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def encode(self, text: str, record: logging.LogRecord) -> bytes:
        return self.encode_plain(text, _PRIORITIES.get(record.levelname, 6))

    def encode_plain(self, text: str, priority: int = _PRIORITIES["WARNING"]) -> bytes:
        body = text.rstrip("\n").replace("\n", " | ")
        return f"PRIORITY={priority}\nSYSLOG_IDENTIFIER=nri-gpu\nMESSAGE={body}\n".encode(errors="backslashreplace")

    def writable(self, timeout_s: float) -> bool:
        del timeout_s  # a datagram is taken or lost, at once
        return True

    def write(self, data: bytes) -> int:
        try:
            self._socket.sendto(data, socket.MSG_DONTWAIT, os.fspath(JOURNAL_SOCKET))
        except OSError:
            return len(data)  # the journal is full or away; the next line may find it again
        return len(data)


def line_of(record: logging.LogRecord) -> str:
    """The whole of a record, without its time. A traceback shows code, and no values: environments are among those."""
    known = record.__dict__.get("fields", {})
    fields = "".join(f" {name}={_quoted(known[name])}" for name in FIELDS if name in known)
    line = f"{record.levelname: <7} {record.getMessage()}{fields}\n"
    return f"{line}{_TRACEBACKS.formatException(record.exc_info)}\n" if record.exc_info else line


def _clock(seconds: float) -> str:
    """Of the day, with microseconds."""
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1e6):06}"


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(c in ' "=\\' for c in text):
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text) + '"'
