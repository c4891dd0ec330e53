"""Whether somebody has a Unix socket open, without disturbing them."""

from __future__ import annotations

import errno
import socket
import stat
from enum import StrEnum
from pathlib import Path


class SocketState(StrEnum):
    """What is at the path of a socket."""

    LIVE = "live"
    DEAD = "left behind by a process that has ended"
    MISSING = "missing"
    OTHER = "not a socket"
    CLOSED = "closed to this user"


def socket_state(path: Path) -> SocketState:
    """The state of a stream socket.

    Connects with a socket of another type: the kernel then says whether the path belongs to a living socket (EPROTOTYPE
    if it does, ECONNREFUSED if not), and its owner hears nothing of it (unix(7); Linux: net/unix/af_unix.c).
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return SocketState.OTHER
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return SocketState.MISSING
    except ConnectionRefusedError:
        return SocketState.DEAD
    except OSError as error:
        return SocketState.LIVE if error.errno == errno.EPROTOTYPE else SocketState.CLOSED
    return SocketState.LIVE
