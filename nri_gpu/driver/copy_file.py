"""Puts a host file where containers can have it: by reflink, hard link or copy, whichever works first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FICLONE: Final = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
CHUNK_BYTES: Final = 1 << 26
READABLE: Final = 0o444
FILE_MODE: Final = 0o555  # libraries too: distributions differ, and the loader does not mind

# Puts the file of the first path at the second, which does not exist yet; or raises OSError and leaves nothing there.
CopyMethod = Callable[[Path, Path], None]


def reflink(original: Path, target: Path) -> None:
    """Makes a file that shares blocks with the original: on XFS, btrfs and bcachefs; EOPNOTSUPP elsewhere."""

    def clone(source: int, new: int) -> None:
        fcntl.ioctl(new, FICLONE, source)

    _new_file(original, target, clone)


def hard_link(original: Path, target: Path) -> None:
    """Gives the original a second name: no space, no time, and no mode of its own.

    If something wrote into the original in place, the file would change under a running container. Package managers do
    not: dpkg, rpm and NVIDIA's installer put a new file at the name, and our link keeps the old one.
    A hardened unit gets EXDEV: each of its writable paths is a mount of its own, and link(2) does not cross mounts.
    """
    if original.lstat().st_mode & READABLE != READABLE:
        raise PermissionError(f"{original} is not readable by everyone, and a link cannot change that")
    os.link(original, target, follow_symlinks=False)


def copy(original: Path, target: Path) -> None:
    """Copies the file, to disk before this returns."""

    def transfer(source: int, new: int) -> None:
        while os.sendfile(new, source, None, CHUNK_BYTES):  # None: from where it is
            pass

    _new_file(original, target, transfer)


# A reflink is as cheap as a hard link, and does not change when something writes into the original.
FROM_HOST: Final[Sequence[CopyMethod]] = (reflink, hard_link, copy)
# Between the trees of one generation both names are ours, so one inode, and one place in the page cache, is best.
WITHIN_GENERATION: Final[Sequence[CopyMethod]] = (hard_link, reflink, copy)


def place(original: Path, target: Path, methods: Sequence[CopyMethod]) -> None:
    """Puts `original` at `target` by the first method that works. Raises: OSError: of the last one."""
    *others, last = methods
    for method in others:
        try:
            return method(original, target)
        except OSError:
            continue  # EXDEV, EPERM, EOPNOTSUPP, EMLINK ...: the error of the last one says what is really wrong
    return last(original, target)


def _new_file(original: Path, target: Path, fill: Callable[[int, int], None]) -> None:
    source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(source)
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fill(source, new)
            os.fchmod(new, FILE_MODE)  # whatever the umask
            os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(new)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(new)
    finally:
        os.close(source)
