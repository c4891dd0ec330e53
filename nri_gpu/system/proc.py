"""The facts of a process in /proc: for our children, too, which bring no event loop."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.system.storage import text_of

PROC: Final = Path("/proc")
PATH_MAX: Final = 1024  # bytes of a path that are kept
_ENDED: Final = ("Z", "X")  # states of a thread
_INITIAL_PIDS: Final = 0xEFFFFFFC  # inode of the host's own PID namespace (Linux: include/linux/proc_ns.h)


class Stat(Struct, frozen=True):
    """A part of a process's stat. started: clock ticks since boot, which tell it from a later process with its PID.

    state: of the first thread, which stays a zombie as long as others live. threads: the first one included.
    """

    state: str
    parent: int
    threads: int
    started: int

    @property
    def lives(self) -> bool:
        """Return whether a thread of the process lives."""
        return self.state not in _ENDED or self.threads > 1


def name_process(part: str = "") -> None:
    """Name this process `nri-gpu`, or `nri-gpu-PART`, for top and pgrep. The kernel keeps 15 bytes."""
    with suppress(OSError):
        (PROC / "self/comm").write_text(f"nri-gpu-{part}" if part else "nri-gpu")


def parse_stat(text: str) -> Stat:
    """Parse a stat file, in which a program names itself in any bytes. Source: proc(5), stat; prctl(2), PR_SET_NAME."""
    fields = text.rpartition(")")[2].split()  # the name may hold blanks and parentheses
    return Stat(fields[0], int(fields[1]), int(fields[17]), int(fields[19]))


def parse_cgroups(text: str) -> tuple[str, ...]:
    """Parse a line of cgroups(7), `4:memory:/kubepods/...`.

    A path has no newline, and may have all else that ends lines.
    """
    paths = (line.split(":", 2)[2][:PATH_MAX] for line in text.split("\n") if line)
    return tuple(dict.fromkeys(path for path in paths if path != "/"))


def living_thread(pid: int | str, proc: Path = PROC) -> Path:
    """Return the folder of a process in /proc, or, if its first thread has ended, of another that lives.

    The kernel shows no mounts and no program of an ended thread, and puts it into the root cgroup of each v1 hierarchy.
    """
    folder = proc / str(pid)
    if not _lives(folder):
        with suppress(OSError):  # the process is gone
            return next(filter(_lives, (folder / "task").iterdir()), folder)
    return folder


def _lives(thread: Path) -> bool:
    text = text_of(f"{thread}/stat")
    return parse_stat(text).state not in _ENDED if text else False


def has_hosts_pids() -> bool:
    """Return whether this process's PID namespace is the host's own."""
    return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PIDS  # noqa: PTH116 - costs a third of pathlib's
