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
        if name in names and _lives(folder) and (contained or _of_the_node(proc, folder)):
            words = text_of(folder / "cmdline", _ARGUMENTS_MAX, "utf-8")
            if words is not None:  # else it has ended since
                yield RunningProgram(pid, name, tuple(words.rstrip("\0").split("\0")))


def _status(folder: Path, field: str) -> list[list[str]]:
    """Return the words of a field of /proc/PID/status."""
    lines = (text_of(folder / "status", _ARGUMENTS_MAX) or "").split("\n")  # a name may have other ends of lines
    return [line.split()[1:] for line in lines if line.startswith(f"{field}:")]


def _lives(folder: Path) -> bool:
    """Return whether a process has not ended: a zombie keeps its name until its parent has asked for its end."""
    return not any(words[:1] in (["Z"], ["X"]) for words in _status(folder, "State"))


def _of_the_node(proc: Path, folder: Path) -> bool:
    """Return whether a process has one pid, and the node's users: a container has more pids, a rootless one its users.

    The pid is the one in the namespace that /proc shows.
    """
    return all(len(pids) == 1 for pids in _status(folder, "NSpid")) and _shares(proc, folder, "ns/user", "uid_map")


def shares_mounts(proc: Path, pid: int) -> bool:
    """Return whether a process has the node's mounts, as far as this user may look: else its files are others."""
    return _shares(proc, proc / str(pid), "ns/mnt")


def _shares(proc: Path, folder: Path, *namespaces: str) -> bool:
    """Return whether a process is in the namespaces of the node's first, or else in ours, as far as they are read."""
    pairs = (
        (_identity(folder / name), _identity(proc / "1" / name) or _identity(proc / "self" / name))
        for name in namespaces
    )
    return all(one == other or not (one and other) for one, other in pairs)


def _identity(path: Path) -> str:
    """Return the namespace that a link names, or the text of a file, or empty if neither may be read."""
    try:
        return str(path.readlink())
    except OSError:
        return text_of(path, _ARGUMENTS_MAX) or ""


def is_installed(seen: Examined, unit: str) -> bool:
    return any(seen.at(f"{folder}/{unit}").exists() for folder in UNIT_FOLDERS)


def is_enabled(seen: Examined, unit: str) -> bool:
    """Return whether systemd starts the unit at boot; its link may lead out of the root folder."""
    return any(os.path.lexists(each / unit) for each in seen.at(UNIT_FOLDERS[0]).glob("*.wants"))


def unit_of(seen: Examined, process: RunningProgram | None, units: tuple[str, ...]) -> str:
    """Return the unit of a process, by its cgroup; else the first of `units` that is installed; else the first."""
    running = _UNIT.search(text_of(seen.at(f"/proc/{process.pid}/cgroup"), 4096) or "") if process else None
    return running[1] if running else next((each for each in units if is_installed(seen, f"{each}.service")), units[0])
