"""Processes, read from /proc and watched through pidfds."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
from asyncio.trsock import TransportSocket
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.system.proc import PROC, parse_stat
from nri_gpu.system.storage import read_bytes, text_of

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Process(Struct, frozen=True):
    """A process, told apart from a later one with the same PID. started: clock ticks since boot."""

    pid: int
    started: int


def process_of(pid: int, proc: Path = PROC) -> Process | None:
    """Return the process with that PID, or None if there is none, if all its threads have ended, or if it is unseen."""
    with suppress(OSError):
        return _find(pid, proc)
    return None


def lives(process: Process, proc: Path = PROC) -> bool:
    """Return whether a process lives. One that cannot be looked at, as without a free descriptor, counts as alive."""
    try:
        return _find(process.pid, proc) == process
    except OSError:
        return True


def _find(pid: int, proc: Path) -> Process | None:
    """Return the process with that PID, or None if it has ended. Raises: OSError: /proc cannot be read."""
    try:
        text = read_bytes(f"{proc}/{pid}/stat", -1).decode("ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    stat = parse_stat(text) if text else None
    return Process(pid, stat.started) if stat and stat.lives else None


def user_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the effective user ID of a process on the host, or None if /proc does not have it."""
    if pid <= 0:
        return None
    # Not splitlines(): the first line has the program's name, in which the kernel escapes nothing but line feeds.
    lines = (text_of(proc / str(pid) / "status") or "").split("\n")
    found = next((line.split() for line in lines if line.startswith("Uid:")), [])
    return int(found[2]) if len(found) == 5 else None


def has_our_pids(connection: socket.socket | TransportSocket) -> bool:
    """Return whether the peer of a UNIX socket knows processes by the same PIDs as this process.

    The peer's PID is 0 here if the peer is outside our namespace (unix(7), SO_PEERCRED); inside one below ours it has
    more than one. They are read by its pidfd, since /proc may hide it (proc(5), /proc/pid/fdinfo, NSpid).
    """
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if pid <= 0:
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    text = text_of(PROC / "self/fdinfo" / str(fd)) or ""
    os.close(fd)
    return next((line.split()[1:] for line in text.splitlines() if line.startswith("NSpid:")), []) == [str(pid)]


class ProcessWatch:
    """A watch on one process through a descriptor that is readable once it ended. Source: pidfd_open(2).

    ended: set then, by the event loop that the watch was made in.
    """

    def __init__(self, process: Process) -> None:
        """Begin the watch. Raises: ProcessLookupError: the process is gone; OSError: it cannot be watched."""
        self.process = process
        self.fd = os.pidfd_open(process.pid)
        try:
            if _find(process.pid, PROC) != process:  # it ended meanwhile, and another process may have its PID
                raise ProcessLookupError(process.pid)
        except OSError:
            os.close(self.fd)
            raise
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._on_end)

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended, by one system call."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to exactly this process, or nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        self._loop.remove_reader(self.fd)
        os.close(self.fd)

    def _on_end(self) -> None:
        self._loop.remove_reader(self.fd)  # it stays readable
        self.ended.set()
