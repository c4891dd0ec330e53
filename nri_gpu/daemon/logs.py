"""The log: loguru, set up once. It writes fixed phrases with fields to stderr or to the journal, and never blocks.

    logger.bind(gpu_uuid=uuid, rule=rule.name).info("GPU granted")

The runtime waits for our answer and starts containers without us when it is late, so a log that blocks would harm the
whole node. A line is written only when the write cannot block. When its reader stalls, some lines are kept, the others
are dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.daemon.journald import JOURNAL_SOCKET, STDERR, JournalSocket, entry, stderr_is_journal

if TYPE_CHECKING:
    from loguru import Message, Record

# Every field that a line may carry, in the order in which they are printed. Of a container's environment they have
# nothing but what the variables of NVIDIA's that are read ask for, cut in length.
FIELDS: Final = (
    "decision", "code", "reason", "rule", "namespace", "pod_name", "container_name", "pod_uid", "container_id",
    "gpu_uuid", "mode", "generation", "method", "stream_id", "event", "runtime", "runtime_version", "nri_version",
    "socket", "path", "attempt", "gpus", "grants", "foreign", "ungranted", "waiting", "driver_version",
    "inventory_number", "inventory_age_s", "elapsed_ms", "deadline_ms", "parts", "payload_bytes", "fault", "resource",
    "dropped", "lasting_s", "fix", "signal", "pid", "name", "index", "state", "before", "changes", "xid",
    "lost", "cgroup", "pids", "namespaces", "settings", "peer", "follower", "replaced",
    "left_out", "holder", "pods", "claim", "held_s",
)  # fmt: skip
WAITING_LINES: Final = 1_000
PIPE_BUF: Final = 4096  # bytes
FULL_S: Final = 0.01  # between two attempts to write to a full journal, at the end
# The priorities of syslog(3), by loguru's names.
_PRIORITIES: Final = {"TRACE": 7, "DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_QUOTED: Final = frozenset(' "=\\')  # a value with one of these is quoted
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"'}
_handlers: Final = [0]  # loguru's ids of what `_use` added; it starts with a handler 0 of its own


def set_up(level: str, *, journal: bool = False, journal_socket: Path = JOURNAL_SOCKET) -> None:
    """Log from this level on, for a process that serves: to the journal's socket if stderr ends in the journal too.

    journal: to that socket in any case, because nobody reads stderr.
    """
    native = stderr_is_journal() or (journal and journal_socket.exists())
    sink = _Sink(_Journal(journal_socket) if native else _Stderr())
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
    """The way from asyncio's log to ours: a handler of the standard library writes to stderr, and may block there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one line for one of asyncio's."""
        level = record.levelname if record.levelname in _PRIORITIES else "WARNING"
        bound = logger.opt(exception=record.exc_info[1] if record.exc_info else None).bind(
            name=record.name, fault=record.getMessage()
        )
        bound.log(level, "a library logged a message")


class _Line(Struct, frozen=True):
    """A line on its way. text: without the time. fields: by the journal's names, one for each value."""

    text: str
    priority: int = _PRIORITIES["WARNING"]
    clock: str = ""
    fields: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, record: Record, *, fields: bool) -> _Line:
        clock = record["time"].strftime("%H:%M:%S.%f ")
        named = tuple(_journal_fields(record)) if fields else ()
        return cls(line_of(record), _PRIORITIES.get(record["level"].name, 6), clock, named)


class _Sink:
    """The writer of lines that can be written now; it keeps some that cannot, and never waits.

    No thread: one that wakes for every line competes with the event loop for the interpreter just when a reply is due.
    """

    def __init__(self, channel: _Stderr | _Journal) -> None:
        self._channel = channel
        self._waiting: deque[_Line] = deque()
        self._dropped = 0

    def take(self, message: Message) -> None:
        if len(self._waiting) < WAITING_LINES:
            self._waiting.append(_Line.of(message.record, fields=isinstance(self._channel, _Journal)))
        else:
            self._dropped += 1
        self._write()

    def close(self) -> None:
        """Write what is kept, for a second at most."""
        deadline = time.monotonic() + 1
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            self._channel.wait(left)
            self._write()

    def _write(self) -> None:
        try:
            while self._waiting and self._channel.write(self._waiting[0]):
                self._waiting.popleft()
                self._report_dropped()
        except OSError:  # nobody reads any more, and there is nowhere to report that
            self._waiting.clear()

    def _report_dropped(self) -> None:
        if self._dropped and not self._waiting:
            fields = (("DROPPED", str(self._dropped)),)
            self._waiting.append(_Line(f"WARNING log lines lost dropped={self._dropped}\n", fields=fields))
            self._dropped = 0


class _Stderr:
    """The descriptor itself: sys.stderr has locks and buffers of its own. `write` raises OSError."""

    def __init__(self) -> None:
        self._timed = not stderr_is_journal()  # journald adds the time itself
        self._poll = select.poll()
        self._poll.register(STDERR, select.POLLOUT)
        self.rest = b""  # of a line of which a part is written

    def write(self, line: _Line) -> bool:
        """Write as much as is taken at once. Return whether the whole line, or the rest of it, is written."""
        text = line.clock + line.text if self._timed else line.text
        self.rest = self.rest or text.encode(errors="backslashreplace")
        while self.rest and self.wait(0):
            # A descriptor that poll calls writable takes this much at once, pipe or stream socket (pipe(7), unix(7)).
            self.rest = self.rest[os.write(STDERR, self.rest[:PIPE_BUF]) :]
        return not self.rest

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1000))


class _Journal:
    """The journal's socket, or stderr while nobody has that socket. `write` raises OSError if nobody has either."""

    def __init__(self, path: Path) -> None:
        self._socket = JournalSocket(path)
        self._stderr = _Stderr()

    def write(self, line: _Line) -> bool:
        """Write the line if it is taken at once. Return whether it was."""
        if self._stderr.rest:
            return self._stderr.write(line)
        try:
            self._socket.send(entry(line.priority, line.text, line.fields))
        except BlockingIOError:
            return False
        except OSError:
            return self._stderr.write(line)
        return True

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, FULL_S))


def line_of(record: Record) -> str:
    """Return the whole line of a record, without its time. A traceback shows code, not values such as environments."""
    fields = "".join(f" {name}={_quoted(text)}" for name, text in _fields(record))
    line = f"{record['level'].name: <7} {record['message']}{fields}\n"
    raised = record["exception"]
    return line + "".join(traceback.format_exception(*raised)) if raised else line


def _journal_fields(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the fields of a line, without quotes. Each GPU has a field of its own, so that `GPU_UUID=` finds each."""
    for name, text in _fields(record):
        yield from ((name.upper(), part) for part in (text.split(",") if name == "gpu_uuid" else [text]))


def _fields(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the fields of a line in their order, without those that are empty: what is not known is not said."""
    known = record["extra"]
    found = ((name, _plain(known[name])) for name in FIELDS if name in known)
    return ((name, text) for name, text in found if text)


def _plain(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    if text.isprintable() and _QUOTED.isdisjoint(text):
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text) + '"'
