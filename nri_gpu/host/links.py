"""Makes the links in /dev/char."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from nri_gpu.host.actions import MakeLink
from nri_gpu.host.facts import HostError
from nri_gpu.host.folders import parent_of


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
