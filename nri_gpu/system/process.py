"""Processes, read from /proc: for our children, too, which bring no event loop."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from nri_gpu.system.proc import PROC, parse_stat
from nri_gpu.system.storage import read_bytes, text_of

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Process(Struct, frozen=True):
    """A process, told apart from a later one with the same PID. started: clock ticks since boot."""

    pid: int
    started: int


def process_of(pid: int, proc: Path = PROC) -> Process | None:
    """Return the process with that PID, or None if there is none, if all its threads have ended, or if it is unseen."""
    with suppress(OSError):
        return find_process(pid, proc)
    return None


def lives(process: Process, proc: Path = PROC) -> bool:
    """Return whether a process lives. One that cannot be looked at, as without a free descriptor, counts as alive."""
    try:
        return find_process(process.pid, proc) == process
    except OSError:
        return True


def find_process(pid: int, proc: Path) -> Process | None:
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
