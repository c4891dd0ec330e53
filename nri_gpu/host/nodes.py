"""Makes device nodes and links below /dev, in directories held open so that nobody can replace them meanwhile."""

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
    """A descriptor of the directory that `path` is in, made if it is missing, and the name in it.

    Raises: OSError: there is a link, or no directory, in its place.
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
    """A path to the file of an O_PATH descriptor, for calls that take no such descriptor."""
    return f"/proc/self/fd/{descriptor}"


def _subfolder(parent: int, name: str) -> int:
    made = False
    with suppress(FileExistsError):
        os.mkdir(name, FOLDER_MODE, dir_fd=parent)
        made = True
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    if made:
        os.chmod(handle(descriptor), FOLDER_MODE)  # noqa: PTH101 - of a descriptor; mkdir applied the umask
    return descriptor


def make_link(dev: Path, action: MakeLink) -> None:
    """Make a link, after removing the one that it replaces. A link that somebody else made meanwhile stays.

    Raises: HostError, OSError.
    """
    with parent_of(dev, action.path) as (folder, name):
        _check_target(folder, name, action.target)
        if action.replaces is not None:
            # readlink(2) fails if it is no link any more.
            if os.readlink(name, dir_fd=folder) != action.replaces:
                raise HostError(f"no longer leads to {action.replaces}: something else changes it")
            os.unlink(name, dir_fd=folder)
        with suppress(FileExistsError):
            os.symlink(action.target, name, dir_fd=folder)


def _check_target(folder: int, name: str, target: str) -> None:
    """Raises: HostError: the target is not that device, for example because its node could not be made."""
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise HostError(f"{target} is not there") from None
    if not stat.S_ISCHR(status.st_mode) or f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" != name:
        raise HostError(f"{target} is not the device {name}")


# Until the node has its owner, so that it is never open to more users than it should be.
_AT_FIRST: Final = 0o600


def make_node(dev: Path, action: MakeNode) -> None:
    """Make a node, after removing the one that it replaces.

    A node that somebody else made meanwhile stays, since nvidia-modprobe makes the same ones; the next look checks it.

    Raises: HostError, OSError.
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
    """A descriptor of an existing node, which pins its inode. Raises: HostError: it is another node."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISCHR(status.st_mode) or node_of(status).number != number:
            raise HostError(f"is no longer the device {number[0]}:{number[1]}: something else changes it")
        yield descriptor
    finally:
        os.close(descriptor)
