"""Folders below /dev, held open while something is done in them, so that nobody can put another in their place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nri_gpu.host.facts import DevPath

FOLDER_MODE: Final = 0o755
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def parent_of(dev: Path, path: DevPath) -> Iterator[tuple[int, str]]:
    """The folder that `path` is in, as a descriptor, and the name in it; made where it is missing.

    Raises: OSError: a link, or no directory, is in its place.
    """
    *folders, name = PurePosixPath(path).parts
    opened = [os.open(dev, _FOLDER)]
    try:
        for folder in folders:
            opened.append(_subfolder(opened[-1], folder))
        yield opened[-1], name
    finally:
        for descriptor in opened:
            os.close(descriptor)


def handle(descriptor: int) -> str:
    """A path to exactly what an O_PATH descriptor is of, for calls that take no such descriptor."""
    return f"/proc/self/fd/{descriptor}"


def _subfolder(parent: int, name: str) -> int:
    made = False
    with suppress(FileExistsError):
        os.mkdir(name, FOLDER_MODE, dir_fd=parent)
        made = True
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    if made:
        os.chmod(handle(descriptor), FOLDER_MODE)  # noqa: PTH101 - of a descriptor; the umask has no say in it
    return descriptor
