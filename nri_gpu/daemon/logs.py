"""The log: loguru, set up once. It writes fixed phrases with fields to stderr or to the journal, and never blocks.

    logger.bind(gpu_uuid=uuid, rule=rule.name).info("gpu granted")

The runtime waits for our answer and starts containers without us when it is late, so a log that blocks would harm the
whole node. A line is written only when the write cannot block. When the reader of stderr stalls, some lines are kept,
the others are dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

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
# Of syslog(3), by loguru's names.
_PRIORITIES: Final = {"TRACE": 7, "DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"'}
_handlers: Final = [0]  # loguru's ids of what `_use` added; it starts with a handler 0 of its own


def set_up(level: str, *, journal: bool = False) -> None:
    """Log from this level on, for a process that serves. journal: to its socket, because nobody reads stderr."""
    sink = _Sink(_JournalSocket() if journal and JOURNAL_SOCKET.exists() else _Stderr())
    _use(sink.take, level)
    logging.basicConfig(handlers=[_FromLogging()], level=logging.WARNING, force=True)
    atexit.register(sink.close)


def set_up_command() -> None:
    """Log warnings to stderr, for a command that prints what it was asked for."""
    _use(_print, "WARNING")


def _print(message: Message) -> None:
    sys.stderr.write(line_of(message.record))


def _use(sink: Callable[[Message], None], level: str) -> None:
    for handler in _handlers:
        with suppress(ValueError):  # removed by somebody else
            logger.remove(handler)
    # The sink writes the whole line. A format that loguru fills in would have to be safe against fields with braces.
    _handlers[:] = [logger.add(sink, level=level, format=lambda _: "", backtrace=False, diagnose=False, catch=False)]


class _FromLogging(logging.Handler):
    """Passes on what asyncio logs: a handler of the standard library would write to stderr, and may block there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one line for one of theirs."""
        level = record.levelname if record.levelname in _PRIORITIES else "WARNING"
        bound = logger.opt(exception=record.exc_info[1] if record.exc_info else None).bind(fault=record.getMessage())
        bound.log(level, f"{record.name} logged a message")


class _Sink:
    """Writes lines that can be written now, keeps some that cannot, and never waits.

    No thread: one that wakes for every line competes with the event loop for the interpreter just when a reply is due.
    """

    def __init__(self, channel: _Stderr | _JournalSocket) -> None:
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._dropped = 0

    def take(self, message: Message) -> None:
        data = self._channel.encode(line_of(message.record), message.record)
        if len(self._waiting) < WAITING_LINES:
            self._waiting.append(data)
        else:
            self._dropped += 1
        self._write()

    def close(self) -> None:
        """Write what is kept, for a second at most."""
        deadline = time.monotonic() + 1
        while self._waiting and (left := deadline - time.monotonic()) > 0 and self._channel.writable(left):
            self._write()

    def _write(self) -> None:
        try:
            while self._waiting and self._channel.writable(0):
                rest = self._waiting[0][self._channel.write(self._waiting[0]) :]
                if rest:
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
                    self._report_dropped()
        except OSError:  # nobody reads any more, and there is nowhere to report that
            self._waiting.clear()

    def _report_dropped(self) -> None:
        if self._dropped and not self._waiting:
            self._waiting.append(self._channel.encode_plain(f"WARNING log lines lost dropped={self._dropped}\n"))
            self._dropped = 0


class _Stderr:
    """The descriptor itself: sys.stderr has locks and buffers of its own. `write` raises OSError."""

    def __init__(self) -> None:
        # journald adds the time itself and announces itself by this variable (systemd.exec(5)).
        self._timed = "JOURNAL_STREAM" not in os.environ
        self._poll = select.poll()
        self._poll.register(STDERR, select.POLLOUT)

    def encode(self, text: str, record: Record) -> bytes:
        return self.encode_plain(f"{record['time'].strftime('%H:%M:%S.%f')} {text}" if self._timed else text)

    def encode_plain(self, text: str) -> bytes:
        return text.encode(errors="backslashreplace")

    def writable(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1000))

    def write(self, data: bytes) -> int:
        # What poll calls writable takes this much at once, pipes and stream sockets alike (pipe(7), unix(7)).
        return os.write(STDERR, data[:PIPE_BUF])


class _JournalSocket:
    """The journal's native protocol: one datagram of NAME=value lines (systemd.journal-fields(7))."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def encode(self, text: str, record: Record) -> bytes:
        return self.encode_plain(text, _PRIORITIES.get(record["level"].name, 6))

    def encode_plain(self, text: str, priority: int = _PRIORITIES["WARNING"]) -> bytes:
        body = text.rstrip("\n").replace("\n", " | ")
        return f"PRIORITY={priority}\nSYSLOG_IDENTIFIER=nri-gpu\nMESSAGE={body}\n".encode(errors="backslashreplace")

    def writable(self, timeout_s: float) -> bool:
        del timeout_s  # a datagram is taken or lost at once
        return True

    def write(self, data: bytes) -> int:
        try:
            self._socket.sendto(data, socket.MSG_DONTWAIT, os.fspath(JOURNAL_SOCKET))
        except OSError:
            return len(data)  # the journal is full or away; the next line may reach it again
        return len(data)


def line_of(record: Record) -> str:
    """The whole line of a record, without its time. A traceback shows code and no values: some are environments."""
    known = record["extra"]
    fields = "".join(f" {name}={_quoted(known[name])}" for name in FIELDS if name in known)
    line = f"{record['level'].name: <7} {record['message']}{fields}\n"
    raised = record["exception"]
    return line + "".join(traceback.format_exception(*raised)) if raised else line


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(c in ' "=\\' for c in text):
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text) + '"'
