"""Takes away what an earlier run left when even its keeper was killed."""

import fcntl
import os
import shutil
from pathlib import Path

from tests.support import cleanup
from tests.support.config import Layout

PARENT = Path("/tmp")
PREFIX = "ng-"


def sweep() -> None:
    """Kill and remove every instance whose keeper no longer holds its lock."""
    for base in PARENT.glob(f"{PREFIX}*"):
        if (claim := _claim(base)) is not None:
            try:
                remove(base)
            finally:
                os.close(claim)


def remove(base: Path) -> None:
    """Remove an instance without its keeper: what runs in its cgroup, or was started with its very paths."""
    layout = Layout(base)
    # containerd first, else it would go on starting what we kill
    cleanup.kill_all(lambda: _started_with("--config", layout.config))
    cleanup.kill_all(lambda: _started_with("-address", layout.cri_socket))
    cleanup.kill_all(lambda: cleanup.members(base.name))
    cleanup.unmount_below(base)
    cleanup.remove_cgroups(base.name)
    shutil.rmtree(base, ignore_errors=True)


def _claim(base: Path) -> int | None:
    """An abandoned folder's lock, now held by us; None for a folder in use, half made, or none of ours."""
    try:
        # Anybody may make a folder in /tmp; only our own user's may be removed.
        if base.stat(follow_symlinks=False).st_uid != os.geteuid():
            return None
        handle = os.open(Layout(base).lock, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _started_with(option: str, value: Path) -> list[int]:
    wanted = b"\0".join((b"", option.encode(), os.fsencode(value), b""))
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in file.read_bytes():
                found.append(int(file.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
