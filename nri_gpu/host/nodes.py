"""Folders below /dev, held open while something is done in them, so that nobody can put another in their place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nri_gpu.host.facts import CharDevice, DevPath, FixNode, HostError, MakeLink, MakeNode
from nri_gpu.host.look import node_of

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


def make_link(dev: Path, action: MakeLink) -> None:
    """Make a link, after removing the one that it replaces. Raises: HostError, OSError.

    If somebody else was quicker, theirs stays; the next look says where it leads.
    """
    with parent_of(dev, action.path) as (folder, name):
        _check_target(folder, name, action.target)
        if action.replaces is not None:
            # readlink(2) itself refuses what is no link any more.
            if os.readlink(name, dir_fd=folder) != action.replaces:
                raise HostError(f"no longer leads to {action.replaces}: something else changes it")
            os.unlink(name, dir_fd=folder)
        with suppress(FileExistsError):
            os.symlink(action.target, name, dir_fd=folder)


def _check_target(folder: int, name: str, target: str) -> None:
    """No link to nowhere, as when the node could not be made. Raises: HostError."""
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise HostError(f"{target} is not there") from None
    if not stat.S_ISCHR(status.st_mode) or f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" != name:
        raise HostError(f"{target} is not the device {name}")


# Root's alone until it has its owner, so that it is at no moment open to more than it should be.
_AT_FIRST: Final = 0o600


def make_node(dev: Path, action: MakeNode) -> None:
    """Make a node, after removing the one that it replaces. Raises: HostError, OSError.

    If somebody else was quicker (nvidia-modprobe makes the same ones) theirs stays; the next look says how it is.
    """
    with parent_of(dev, action.path) as (folder, name):
        if action.replaces:
            _remove(folder, name, action.replaces)
        number = os.makedev(action.node.major, action.node.minor)
        with suppress(FileExistsError):
            os.mknod(name, stat.S_IFCHR | _AT_FIRST, number, dir_fd=folder)
            _own(folder, name, action.node)


def fix_node(dev: Path, action: FixNode) -> None:
    """Set mode and owner of a node that still has its number. Raises: HostError, OSError."""
    with parent_of(dev, action.path) as (folder, name):
        _own(folder, name, action.node)


def _own(folder: int, name: str, node: CharDevice) -> None:
    with _held(folder, name, node.number) as descriptor:
        os.chown(handle(descriptor), node.uid, node.gid)
        os.chmod(handle(descriptor), node.mode)  # noqa: PTH101 - of a descriptor


def _remove(folder: int, name: str, was: CharDevice) -> None:
    with _held(folder, name, was.number):
        os.unlink(name, dir_fd=folder)


@contextmanager
def _held(folder: int, name: str, number: tuple[int, int]) -> Iterator[int]:
    """Something that is there, held by its inode and not by its name. Raises: HostError: it is not that node."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISCHR(status.st_mode) or node_of(status).number != number:
            raise HostError(f"is no longer the device {number[0]}:{number[1]}: something else changes it")
        yield descriptor
    finally:
        os.close(descriptor)
