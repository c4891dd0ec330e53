"""Logging, set up once: fixed phrases with fields, to stderr, and never in the way of a reply.

A log that blocks would hold the whole node: the runtime waits for us under one lock, and starts containers without
us when we are late. So lines go through a bounded queue to a thread; when the reader of stderr stalls, lines are
dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

# Every field that a line may carry, in the order in which they are printed. Nothing of a container's environment.
FIELDS: Final = (
    "decision", "code", "reason", "rule", "namespace", "pod_name", "container_name", "pod_uid", "container_id",
    "gpu_uuid", "mode", "generation", "method", "stream_id", "event", "runtime", "runtime_version", "nri_version",
    "socket", "path", "attempt", "gpus", "grants", "foreign", "driver_version", "inventory_number",
    "inventory_age_s", "elapsed_ms", "deadline_ms", "parts", "payload_bytes", "fault", "dropped", "signal", "pid",
    "name", "index",
)  # fmt: skip
QUEUE_LINES: Final = 10_000
STDERR: Final = 2
JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
_PRIORITIES: Final = {"TRACE": 7, "DEBUG": 7, "INFO": 6, "SUCCESS": 5, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_ESCAPES: Final = {"\\": "\\\\", '"': '\\"'}

Write = Callable[[str, "Record"], None]


def set_up(level: str, *, journal: bool = False) -> None:
    """Send the log to stderr, or to the journal's socket when stderr is lost (launched by the runtime)."""
    write = _journal() if journal and JOURNAL_SOCKET.exists() else _to_stderr
    sink = _Sink(write)
    logger.remove()
    # diagnose=False: a traceback must not print variables, among them containers' environments.
    logger.add(sink, level=level, format=_format, diagnose=False, backtrace=False)
    logging.basicConfig(handlers=[_Borrowed()], level=logging.WARNING, force=True)
    atexit.register(sink.close)


class _Borrowed(logging.Handler):
    """What asyncio says of itself, by the same way: its own handler would write to stderr and may hang there."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line of ours for one of theirs."""
        bound = logger.opt(exception=record.exc_info).bind(fault=record.getMessage())
        bound.log(record.levelname, f"{record.name} has something to say")


class _Sink:
    """A bounded queue and the thread that empties it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._dropped = 0
        self._queue: queue.Queue[tuple[str, Record] | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._drain, name="log", daemon=True)
        self._thread.start()

    def __call__(self, message: Message) -> None:
        try:
            self._queue.put_nowait((str(message), message.record))
        except queue.Full:
            self._dropped += 1

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            text, record = item
            if self._dropped:
                text = f"{text.rstrip()} dropped={self._dropped}\n"
                self._dropped = 0
            with contextlib.suppress(OSError):  # nobody reads, and there is nowhere to say so
                self._write(text, record)

    def close(self) -> None:
        """Write what is queued, for a second at most."""
        try:
            self._queue.put(None, timeout=0.1)
        except queue.Full:
            return
        self._thread.join(timeout=1)


def _to_stderr(text: str, record: Record) -> None:
    # journald adds the time itself and says so by this variable (systemd.exec(5)).
    prefix = "" if "JOURNAL_STREAM" in os.environ else record["time"].strftime("%H:%M:%S.%f ")
    # Not sys.stderr: a thread that hangs in it holds its lock, and the interpreter aborts over that at exit.
    data = (prefix + text).encode(errors="backslashreplace")
    while data:
        data = data[os.write(STDERR, data) :]


def _journal() -> Write:
    """The journal's native protocol: one datagram of NAME=value lines (systemd.journal-fields(7))."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def write(text: str, record: Record) -> None:
        priority = _PRIORITIES.get(record["level"].name, 6)
        body = text.rstrip("\n").replace("\n", " | ")
        channel.sendto(
            f"PRIORITY={priority}\nSYSLOG_IDENTIFIER=nri-gpu\nMESSAGE={body}\n".encode(), os.fspath(JOURNAL_SOCKET)
        )

    return write


def _format(record: Record) -> str:
    extra = record["extra"]
    fields = " ".join(f"{name}={_quoted(extra[name])}" for name in FIELDS if name in extra)
    # The braces are loguru's template syntax; fields may hold braces of their own.
    extra["_fields"] = f" {fields}" if fields else ""
    return "{level: <7} {message}{extra[_fields]}\n{exception}"


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(c in ' "=\\' for c in text):
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text) + '"'
