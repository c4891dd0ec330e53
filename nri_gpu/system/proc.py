"""The facts of a process in /proc: for our children, too, which bring no event loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from msgspec import Struct

PROC: Final = Path("/proc")
_INITIAL_PIDS: Final = 0xEFFFFFFC  # inode of the host's own PID namespace (Linux: include/linux/proc_ns.h)


class Stat(Struct, frozen=True):
    """A part of a process's stat. started: clock ticks since boot, which tell it from a later process with its PID."""

    state: str
    parent: int
    started: int


def parse_stat(text: str) -> Stat:
    """Parse a stat file, in which a program names itself in any bytes. Source: proc(5), stat; prctl(2), PR_SET_NAME."""
    fields = text.rpartition(")")[2].split()  # the name may hold blanks and parentheses
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def has_hosts_pids() -> bool:
    """Return whether this process's PID namespace is the host's own."""
    return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PIDS  # noqa: PTH116 - costs a third of pathlib's
