"""One file of the host: where it really lies, and whether we may hand it to containers."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

LINKS_MAX: Final = 40  # as the kernel follows: MAXSYMLINKS, include/linux/namei.h


class Source(Struct, frozen=True):
    """A regular file of the host that containers may have, and what tells it from a later one at its path.

    path: without any symlink. relative: below the driver root, for people. mode: permission bits.
    """

    path: Path
    relative: str
    size_bytes: int
    mtime_ns: int
    device: int
    inode: int
    mode: int

    @classmethod
    def of(cls, path: Path, relative: str, found: os.stat_result) -> Self:
        """From what lstat(2) said of `path`."""
        identity = (found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)
        return cls(path, relative, *identity, stat.S_IMODE(found.st_mode))

    def unchanged(self) -> bool:
        """Whether the same file, with the same content as far as the kernel tells, is still there."""
        try:
            return Source.of(self.path, self.relative, self.path.lstat()) == self
        except OSError:
            return False


class LeftOut(Struct, frozen=True):
    """A file of the driver that is not given to containers. path: below the driver root. reason: a clause."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def examine(root: Path, path: Path) -> Source | LeftOut:
    """Whether containers may have the file that `path`, below `root`, leads to. root: without symlinks."""
    relative = str(path.relative_to(root))
    real = resolve(root, path)
    if real is None:
        return LeftOut(relative, "leads to nothing below the driver root")
    try:
        found = real.lstat()
    except OSError as error:
        return LeftOut(relative, f"cannot be looked at: {error.strerror}")
    reason = _distrust(found)
    return LeftOut(relative, reason) if reason else Source.of(real, relative, found)


def resolve(root: Path, path: Path) -> Path | None:
    """Where `path` really leads, below `root`; None when that is nowhere.

    An absolute link counts as it is while it stays below the root, else as it would inside a chroot: the root of a
    driver container links to /etc/alternatives and means its own.
    """
    plain = Path(os.path.realpath(path))
    if plain.is_relative_to(root) and plain.exists():
        return plain
    inside = _resolve_inside(root, path)
    return inside if inside is not None and inside.exists() else None


def distinct_folders(root: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """Those that exist, each once: `lib64` is often a link to `usr/lib64`.

    By the name given, or where that leads out of the root, by the one it has inside.
    """
    seen = set()
    for folder in folders:
        real = resolve(root, folder)
        if real is not None and real.is_dir() and real not in seen:
            seen.add(real)
            yield folder if os.path.realpath(folder) == str(real) else real


def trusted(found: os.stat_result) -> bool:
    """Whether nobody but root and ourselves can change it.

    Ourselves is root where it matters; elsewhere (tests, a dry run) we could change our own files anyway.
    """
    return found.st_uid in {0, os.geteuid()} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _resolve_inside(root: Path, path: Path) -> Path | None:
    parts, here, links = deque(path.relative_to(root).parts), root, 0
    while parts:
        part = parts.popleft()
        step = here / part
        if part == "..":
            here = root if here == root else here.parent
        elif step.is_symlink():
            links += 1
            if links > LINKS_MAX:
                return None
            target = step.readlink()
            here = root if target.is_absolute() else here
            parts.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        else:
            here = step
    return here


def changeable(found: os.stat_result) -> str:
    """Why it is not `trusted`: a clause."""
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: others than root can change it"


def _distrust(found: os.stat_result) -> str:
    """Why not, empty when there is no reason."""
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return "setuid or setgid"
    return "" if trusted(found) else changeable(found)
