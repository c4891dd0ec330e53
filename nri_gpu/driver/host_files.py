"""The host driver's files below a driver root: where each really is, and whether containers may have it."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from nri_gpu.domain.errors import DriverError, cause_of
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
        return cls(path, relative, *_identity(found))

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
            found = _identity(os.lstat(self.path))
        except OSError:
            return False
        return found == (self.size_bytes, self.mtime_ns, self.device, self.inode, self.mode)


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
        return LeftOut(relative, f"cannot be read: {cause_of(error)}")
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
    found = resolve_text(os.fspath(root).rstrip("/"), os.fspath(path))
    return None if found is None else Path(found)


def resolve_text(top: str, path: str) -> str | None:
    """Return as `resolve`, for the looks every few seconds: a `Path` costs more than its stat(2).

    top: the root without a slash at its end.
    """
    if os.path.exists(path):  # noqa: PTH110 - a string, as above
        plain = os.path.realpath(path)
        if f"{plain}/".startswith(f"{top}/"):
            return plain
    return _resolve_inside(top, path.removeprefix(top))


def _resolve_inside(top: str, relative: str) -> str | None:
    parts, here, links = relative.split("/")[::-1], top, 0
    while parts:
        part = parts.pop()
        if part == "..":
            here = here if here == top else _parent(here)
        elif part not in ("", "."):
            here = f"{here}/{part}"
            try:
                target = os.readlink(here)  # noqa: PTH115 - a string, as above
            except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL byte is in no file's name
                return None
            except OSError as error:
                if error.errno != errno.EINVAL:  # which says that it is no link
                    raise
                continue
            links += 1
            if links > LINKS_MAX:
                return None
            here = top if target.startswith("/") else _parent(here)
            parts += target.split("/")[::-1]
    return here or "/"


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _identity(found: os.stat_result) -> tuple[int, int, int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino, stat.S_IMODE(found.st_mode)


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
