"""Files in folders that another than root may have changed: no link is followed, nothing is waited for, sizes end.

A folder that only root can replace is opened by its path, all below it by the descriptor of the folder above.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextmanager
def opened_folder(path: str | Path, above: int | None = None) -> Iterator[int]:
    """Open a folder by its path, or by its name in the folder above, where a link is no folder. Raises: OSError."""
    try:
        descriptor = os.open(path, _FOLDER if above is None else _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError as error:
        raise OSError(errno.ENOTDIR, "it is no folder, or a link, which is not followed", str(path)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folders_in(above: int) -> Iterator[tuple[str, int]]:
    """Yield name and descriptor of each folder in a folder, by name; one that goes meanwhile is left out.

    Raises: OSError. Descriptors are closed when the next is asked for.
    """
    for name in names_in(above):
        with suppress(FileNotFoundError, NotADirectoryError), opened_folder(name, above) as folder:
            yield name, folder


def names_in(folder: int) -> list[str]:
    """Return the names of all that is in a folder, sorted. Raises: OSError."""
    return sorted(os.listdir(folder))


def read_in(folder: int, name: str, most: int) -> tuple[bytes, float]:
    """Return the content of a regular file of at most so many bytes, and when it was written, seconds since the epoch.

    Raises: OSError, whose `strerror` also says that it is no such file, as a clause.
    """
    _check(os.stat(name, dir_fd=folder, follow_symlinks=False), name, most)  # opening a device may do something
    descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        _check(found, name, most)
        return os.read(descriptor, found.st_size), found.st_mtime
    finally:
        os.close(descriptor)


def _check(found: os.stat_result, name: str, most: int) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", name)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", name)
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most}", name)
