"""The users of a Unix socket, found without disturbing them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import text_of

_ACCEPTS: Final = 1 << 16  # __SO_ACCEPTCON
_TABLE_MAX: Final = 8 << 20  # bytes of /proc/PID/net/unix
_UNIX_DIAG: Final = (4, 20, 2, 1)  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, UDIAG_SHOW_VFS, UNIX_DIAG_VFS
_ANSWER_S: Final = 0.2


class SocketState(StrEnum):
    """The state of the path of a socket."""

    LIVE = "live"
    DEAD = "left behind by a process that has ended"
    MISSING = "missing"
    OTHER = "not a socket"
    CLOSED = "closed to this user"


def socket_state(path: Path) -> SocketState:
    """Return the state of a stream socket.

    Connect with a socket of another type: the kernel then says whether the path belongs to a living socket (EPROTOTYPE
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


def listening(process: Path) -> Iterator[tuple[str, int]]:
    """Yield path and inode of each Unix socket that a process listens at, or nothing if this user may not look.

    process: its folder below /proc, which may vanish meanwhile.
    """
    opened = set(_opened(process / "fd"))
    for line in (text_of(process / "net/unix", _TABLE_MAX, "utf-8") or "").splitlines() if opened else ():
        _, _, _, flags, _, _, inode, path = [*line.split(maxsplit=7), *[""] * 8][:8]
        if inode.isdecimal() and int(flags, 16) & _ACCEPTS and int(inode) in opened:
            yield path, int(inode)


def _opened(folder: Path) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - the names are enough
    except OSError:
        return
    for name in names:
        try:
            kind, _, inode = str((folder / name).readlink()).partition(":[")
        except OSError:
            continue  # closed since
        if kind == "socket":
            yield int(inode.removesuffix("]"))


def file_of(inode: int) -> tuple[int, int] | None:
    """Return device and inode (its lower 32 bits) of the file that a Unix socket was bound to, as `file_at` does.

    Return None if the kernel does not say: the socket has ended or is of another network namespace (sock_diag(7)).
    """
    family, query, show, attribute = _UNIX_DIAG
    try:
        request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, show, 0xFFFFFFFF, 0xFFFFFFFF)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as kernel:
            kernel.settimeout(_ANSWER_S)
            kernel.send(struct.pack("=IHHII", 16 + len(request), query, 1, 0, 0) + request)  # NLM_F_REQUEST
            answer = kernel.recv(8192)
    except (OSError, struct.error):
        return None
    at = 32 if struct.unpack_from("=H", answer, 4)[0] == query else len(answer)  # behind nlmsghdr and unix_diag_msg
    while at + 12 <= len(answer):
        size, kind = struct.unpack_from("=HH", answer, at)
        if kind == attribute:
            found, device = struct.unpack_from("=II", answer, at + 4)
            return device, found
        at += max(4, (size + 3) & ~3)
    return None


def file_at(path: Path) -> tuple[int, int] | None:
    """Return `file_of` for the file at a path, the device as the kernel counts it, or None if nothing is seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return os.major(found.st_dev) << 20 | os.minor(found.st_dev), found.st_ino & 0xFFFFFFFF
