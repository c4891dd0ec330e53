"""systemd's journal: whether stderr ends there, and its native protocol, by which an entry has fields of its own.

`journalctl -t nri-gpu GPU_UUID=...` finds what was written so. https://systemd.io/JOURNAL_NATIVE_PROTOCOL
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
STDERR: Final = 2
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def stderr_is_journal() -> bool:
    """Return whether systemd connected our stderr to the journal, and it still is there (systemd.exec(5))."""
    try:
        stderr = os.fstat(STDERR)
    except OSError:  # closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"


def entry(priority: int, text: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Return an entry of the journal. priority: of syslog(3). fields: name and value, a name once for each value."""
    ours = (("MESSAGE", text.rstrip("\n")), ("PRIORITY", str(priority)), ("SYSLOG_IDENTIFIER", "nri-gpu"))
    return b"".join(_field(name, value) for name, value in (*ours, *fields))


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if b"\n" in data:
        return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
    return b"%s=%s\n" % (name.encode(), data)


class JournalSocket:
    """A sender of entries that never waits. path: of journald's socket, which need not be there."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def send(self, data: bytes) -> None:
        """Send one entry, whole. Raises: BlockingIOError, if the journal is full; OSError, if nobody has the socket."""
        try:
            self._socket.sendto(data, socket.MSG_DONTWAIT, self._path)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            self._send_file(data)

    def _send_file(self, data: bytes) -> None:
        """Send an entry that is too large for a datagram as a file in memory, which nobody can change any more."""
        memory = os.memfd_create("nri-gpu-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(memory, "wb", buffering=0) as file:
            file.write(data)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            # Not socket.send_fds: that of Python 3.11 leaves out flags and address.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, file.fileno().to_bytes(4, sys.byteorder))
            self._socket.sendmsg([], [rights], socket.MSG_DONTWAIT, self._path)
