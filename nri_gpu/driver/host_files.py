"""The host driver's files below a driver root: where each really is, and whether containers may have it."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver import table
from nri_gpu.system.storage import why_untrusted

LINKS_MAX: Final = 40  # as the kernel follows: MAXSYMLINKS, include/linux/namei.h
LIBRARY_FILE: Final = re.compile(rf"(?P<name>lib[\w+-]+)\.so\.(?P<version>{table.VERSION})")
# A SONAME becomes a file name in the staged folder.
PLAIN_NAME: Final = re.compile(r"lib[\w+.-]+")


class HostFile(Struct, frozen=True):
    """A regular file of the host that containers may have, and what tells it from a later one at the same path."""

    path: Path  # without any symlink
    relative: str  # below the driver root, for messages
    size_bytes: int
    mtime_ns: int
    device: int
    inode: int
    mode: int  # permission bits
    content: bytes | None = None  # that containers get instead of its own

    @classmethod
    def of(cls, path: Path, relative: str, found: os.stat_result) -> Self:
        """Return the file at `path`, from its lstat(2)."""
        identity = (found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)
        return cls(path, relative, *identity, stat.S_IMODE(found.st_mode))

    @property
    def content_facts(self) -> tuple[str, int, int, int]:
        """Return what a generation's name depends on: a different value means a different file or content."""
        return self.relative, self.size_bytes, self.mtime_ns, self.inode

    @property
    def staged_bytes(self) -> int:
        return self.size_bytes if self.content is None else len(self.content)

    def unchanged(self) -> bool:
        """Return whether this file, with the same content as far as the kernel shows, is still there."""
        try:
            return HostFile.of(self.path, self.relative, self.path.lstat()) == replace(self, content=None)
        except OSError:
            return False


class LeftOut(Struct, frozen=True):
    """A file of the driver that containers do not get. path: below the driver root. reason: a clause."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def examine(root: Path, path: Path) -> HostFile | LeftOut:
    """Return the file that `path`, below `root`, leads to, if containers may have it. root: without symlinks."""
    relative = str(path.relative_to(root))
    real = resolve(root, path)
    if real is None:
        return LeftOut(relative, "leads to nothing below the driver root")
    try:
        found = real.lstat()
    except OSError as error:
        return LeftOut(relative, f"cannot be read: {error.strerror}")
    if not stat.S_ISREG(found.st_mode):
        reason = "not a regular file"
    elif found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        reason = "setuid or setgid"
    else:
        reason = why_untrusted(found, real)
    return LeftOut(relative, reason) if reason else HostFile.of(real, relative, found)


def driver_root(folder: Path) -> Path:
    """Return `folder` without symlinks. Raises: DriverError, if `folder` is not a directory."""
    root = Path(os.path.realpath(folder))  # Path.resolve raises on a circle of links
    if not root.is_dir():
        raise DriverError(f"driver root {folder} is not a directory")
    return root


def check_folder(folder: Path, *, follow: bool = True) -> None:
    """Refuse a folder that users other than root can put files into. follow: symlinks. Raises: DriverError; OSError."""
    if why := why_untrusted(folder.stat(follow_symlinks=follow), folder):
        raise DriverError(f"folder {folder} is not safe ({why}): chown root and chmod go-w it")


def resolve(root: Path, path: Path) -> Path | None:
    """Return where `path` really leads below `root`, or None if it leads nowhere.

    An absolute link counts as it is while it stays below the root, else as inside a chroot: the root of a driver
    container links to /etc/alternatives and means its own.
    """
    plain = Path(os.path.realpath(path))
    if plain.is_relative_to(root) and plain.exists():
        return plain
    inside = _resolve_inside(root, path)
    return inside if inside is not None and inside.exists() else None


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


def distinct_folders(root: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders that exist, each once: `lib64` is often a link to `usr/lib64`.

    Each has the name given, or its name inside the root if the given one leads out of it.
    """
    seen = set()
    for folder in folders:
        real = resolve(root, folder)
        if real is not None and real.is_dir() and real not in seen:
            seen.add(real)
            yield folder if os.path.realpath(folder) == str(real) else real
