"""The users of a Unix socket, found without disturbing them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import text_of

_ACCEPTS: Final = 1 << 16  # __SO_ACCEPTCON
_TABLE_MAX: Final = 8 << 20  # bytes of /proc/PID/net/unix
# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_SOCK_DIAG, _BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300  # NLM_F_REQUEST, NLM_F_DUMP
_SHOW_VFS, _SHOW_PEER = 0x2, 0x4
_VFS, _PEER = 1, 2
_CONNECTED, _ALL = 1 << 1, 0xFFFFFFFF  # of the states of a socket
_CLONE_NEWNET: Final = 0x40000000
_ANSWER_S: Final = 0.2
_ANSWER_BYTES: Final = 1 << 16


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
    opened = set(opened_by(process))
    for line in (text_of(process / "net/unix", _TABLE_MAX, "utf-8") or "").splitlines() if opened else ():
        _, _, _, flags, _, _, inode, path = [*line.split(maxsplit=7), *[""] * 8][:8]
        if inode.isdecimal() and int(flags, 16) & _ACCEPTS and int(inode) in opened:
            yield path, int(inode)


def opened_by(process: Path) -> Iterator[int]:
    """Yield the inodes of a process's sockets, or nothing if this user may not look. process: its folder in /proc."""
    folder = process / "fd"
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
    try:
        with _kernel() as kernel:
            _ask(kernel, _REQUEST, _ALL, inode, _SHOW_VFS)
            return next((file for _, file, _ in _sockets(kernel.recv(_ANSWER_BYTES))), None)
    except (OSError, struct.error):
        return None


def clients_of(path: Path, process: Path) -> frozenset[int]:
    """Return the inodes of the sockets that are connected to the socket at a path, in a process's network namespace.

    The kernel has both ends of a connection in the namespace of the end that connected. Return none if it does not say:
    this user may not join the namespace, or look into it. process: its folder in /proc.
    """
    found: set[int] = set()
    file = file_at(path)
    try:
        with _kernel(process / "ns/net") as kernel:
            _ask(kernel, _REQUEST | _DUMP, _CONNECTED, 0, _SHOW_VFS | _SHOW_PEER)
            while answer := kernel.recv(_ANSWER_BYTES):
                found |= {peer for _, of, peer in _sockets(answer) if file and of == file}
                if _ends(answer):
                    break
    except (OSError, struct.error):
        return frozenset()
    return frozenset(found)


def _kernel(namespace: Path | None = None) -> socket.socket:
    """Return a socket for sock_diag(7), in this network namespace or another. Raises: OSError."""
    if namespace is None or namespace.samefile("/proc/self/ns/net"):
        made = [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)]
    else:  # a thread can join a namespace without the rest of its process
        made = []
        joining = threading.Thread(target=_join, args=(namespace, made))
        joining.start()
        joining.join()
    if not made:
        raise PermissionError(errno.EPERM, "the network namespace cannot be joined", str(namespace))
    made[0].settimeout(_ANSWER_S)
    return made[0]


def _join(namespace: Path, made: list[socket.socket]) -> None:
    import ctypes  # only where another namespace is looked into; os.setns is of Python 3.12

    with suppress(OSError), namespace.open("rb") as file:
        if ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0:
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG))


def _ask(kernel: socket.socket, flags: int, states: int, inode: int, show: int) -> None:
    """Ask for Unix sockets: struct unix_diag_req behind struct nlmsghdr."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, states, inode, show, 0xFFFFFFFF, 0xFFFFFFFF)
    kernel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, flags, 0, 0) + request)


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of each netlink message."""
    at = 0
    while at + 16 <= len(answer):
        size, kind = struct.unpack_from("=IH", answer, at)
        yield kind, answer[at + 16 : at + size]
        at += max(16, (size + 3) & ~3)


def _ends(answer: bytes) -> bool:
    return any(kind != _BY_FAMILY for kind, _ in _messages(answer))  # the end of the list, or an error


def _sockets(answer: bytes) -> Iterator[tuple[int, tuple[int, int] | None, int]]:
    """Yield each socket's inode, device and inode of its file or None, and its peer's inode or 0."""
    for kind, content in _messages(answer):
        if kind != _BY_FAMILY:
            return
        file, peer, at = None, 0, 16  # behind struct unix_diag_msg
        while at + 4 <= len(content):
            size, attribute = struct.unpack_from("=HH", content, at)
            if attribute == _VFS:
                found, device = struct.unpack_from("=II", content, at + 4)
                file = device, found
            elif attribute == _PEER:
                (peer,) = struct.unpack_from("=I", content, at + 4)
            at += max(4, (size + 3) & ~3)
        yield struct.unpack_from("=I", content, 4)[0], file, peer


def file_at(path: Path) -> tuple[int, int] | None:
    """Return `file_of` for the file at a path, the device as the kernel counts it, or None if nothing is seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return os.major(found.st_dev) << 20 | os.minor(found.st_dev), found.st_ino & 0xFFFFFFFF
