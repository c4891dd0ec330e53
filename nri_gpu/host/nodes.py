"""Makes device nodes and sets their mode and owner. Never opens one: that would wake the driver, or load it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nri_gpu.host.actions import FixNode, MakeNode
from nri_gpu.host.facts import HostError, Node
from nri_gpu.host.folders import handle, parent_of
from nri_gpu.host.look import node_of

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


def _own(folder: int, name: str, node: Node) -> None:
    with _held(folder, name, node.number) as descriptor:
        os.chown(handle(descriptor), node.uid, node.gid)
        os.chmod(handle(descriptor), node.mode)  # noqa: PTH101 - of a descriptor


def _remove(folder: int, name: str, was: Node) -> None:
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
