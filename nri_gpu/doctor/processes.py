"""The node's processes by name, from /proc; and the units of systemd, which is not asked."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.doctor.examined import Examined
from nri_gpu.system.storage import text_of

NOT_THE_HOST: Final = "only a container's own processes are shown here"
ON_THE_HOST: Final = "nri-gpu doctor    # on the host, or in a pod with hostPID: true"
_ARGUMENTS_MAX: Final = 1 << 16  # bytes
UNIT_FOLDERS: Final = ("/etc/systemd/system", "/usr/lib/systemd/system", "/usr/local/lib/systemd/system")
_UNIT: Final = re.compile(r"/system\.slice/(?:[^\n]*/)?([^/\n]+)\.service")


class RunningProgram(Struct, frozen=True):
    """A process. name: of its program, as the kernel cuts it to 15 characters. arguments: its command line."""

    pid: int
    name: str
    arguments: tuple[str, ...]

    def option(self, *flags: str) -> str:
        """Return the value of an option, as Go's flag packages read it, or empty if it is not given."""
        for index, each in enumerate(self.arguments[1:], 1):
            flag, equals, value = each.partition("=")
            if flag in flags:
                return value if equals else "".join(self.arguments[index + 1 : index + 2])
        return ""


def sees_the_host(proc: Path) -> bool:
    """Return whether these are the node's processes, not a container's: only there the kernel's own are shown."""
    return (text_of(proc / "2/comm") or "").strip() == "kthreadd"


def running(proc: Path, names: Collection[str], *, contained: bool = False) -> Iterator[RunningProgram]:
    """Yield the processes whose program has one of these names, the lowest pid first. contained: containers' too."""
    try:
        pids = sorted(int(each.name) for each in proc.iterdir() if each.name.isdecimal())
    except OSError:
        return
    for pid in pids:
        folder = proc / str(pid)
        name = (text_of(folder / "comm") or "").strip()
        if name in names and (contained or _of_the_node(folder)):
            words = text_of(folder / "cmdline", _ARGUMENTS_MAX, "utf-8")
            if words is not None:  # else it has ended since
                yield RunningProgram(pid, name, tuple(words.rstrip("\0").split("\0")))


def _of_the_node(folder: Path) -> bool:
    """Return whether a process has one pid, in the namespace that /proc shows: a container's has its own, too."""
    lines = (text_of(folder / "status", _ARGUMENTS_MAX) or "").split("\n")  # a name may have other ends of lines
    return all(len(line.split()) == 2 for line in lines if line.startswith("NSpid:"))


def is_installed(seen: Examined, unit: str) -> bool:
    return any(seen.at(f"{folder}/{unit}").exists() for folder in UNIT_FOLDERS)


def is_enabled(seen: Examined, unit: str) -> bool:
    """Return whether systemd starts the unit at boot; its link may lead out of the root folder."""
    return any(os.path.lexists(each / unit) for each in seen.at(UNIT_FOLDERS[0]).glob("*.wants"))


def unit_of(seen: Examined, process: RunningProgram | None, units: tuple[str, ...]) -> str:
    """Return the unit of a process, by its cgroup; else the first of `units` that is installed; else the first."""
    running = _UNIT.search(text_of(seen.at(f"/proc/{process.pid}/cgroup"), 4096) or "") if process else None
    return running[1] if running else next((each for each in units if is_installed(seen, f"{each}.service")), units[0])
