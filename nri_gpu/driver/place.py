"""One file of the driver, put where containers can have it: by reflink, hard link or copy, whichever works first."""

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

# Puts the file at the first path also at the second, which does not exist yet, or raises OSError and leaves nothing.
Way = Callable[[Path, Path], None]


def reflink(original: Path, target: Path) -> None:
    """A file of its own that shares blocks with the original: XFS, btrfs, bcachefs; elsewhere EOPNOTSUPP."""

    def clone(source: int, new: int) -> None:
        fcntl.ioctl(new, FICLONE, source)

    _new_file(original, target, clone)


def hard_link(original: Path, target: Path) -> None:
    """The original itself under a second name: no space, no time, and no mode of its own.

    Such a file would change under a running container if somebody wrote into it in place. Package managers do not:
    dpkg, rpm and NVIDIA's installer put a new file at the name, and ours keeps the old one alive.
    A hardened unit gets EXDEV: each of its writable paths is a mount of its own, and link(2) does not cross mounts.
    """
    if original.lstat().st_mode & READABLE != READABLE:
        raise PermissionError(f"{original} is not readable by everybody, and a link cannot change that")
    os.link(original, target, follow_symlinks=False)


def copy(original: Path, target: Path) -> None:
    """A copy, on disk before this returns."""

    def transfer(source: int, new: int) -> None:
        while os.sendfile(new, source, None, CHUNK_BYTES):  # None: from where it is
            pass

    _new_file(original, target, transfer)


# A reflink first: it is as cheap as a hard link and does not change even when somebody writes into the original.
FROM_HOST: Final[Sequence[Way]] = (reflink, hard_link, copy)
# Between the trees of one generation both names are ours, so one inode is best: one place in the page cache.
WITHIN_GENERATION: Final[Sequence[Way]] = (hard_link, reflink, copy)


def place(original: Path, target: Path, ways: Sequence[Way]) -> None:
    """Put `original` at `target` by the first way that works. Raises: OSError: of the last one."""
    *others, last = ways
    for way in others:
        try:
            return way(original, target)
        except OSError:
            continue  # EXDEV, EPERM, EOPNOTSUPP, EMLINK ...: the last way says what is really wrong
    return last(original, target)


def _new_file(original: Path, target: Path, fill: Callable[[int, int], None]) -> None:
    source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(source)
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fill(source, new)
            os.fchmod(new, FILE_MODE)  # the umask has no say in it
            os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(new)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(new)
    finally:
        os.close(source)
