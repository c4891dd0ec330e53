"""What one private containerd has on the machine, and how to take it away: processes, mounts, cgroups.

Whatever is killed or removed here is provably ours: processes are descendants of our supervisor, members of our own
cgroup or started with our very paths; mounts lie below our base folder, cgroups below the parent that carries our name.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.support.config import Layout

PARENT: Final = Path("/tmp")
PREFIX: Final = "ng-"  # of every instance's base folder
CGROUPS: Final = Path("/sys/fs/cgroup")
KILL_TIMEOUT_S: Final = 15.0
PAUSE_S: Final = 0.01
OCTAL: Final = re.compile(r"\\(\d{3})")  # how mountinfo writes blanks, see proc(5)


class Leftovers(Struct, frozen=True):
    """What a containerd has not taken away. processes: one "pid command line" each."""

    processes: tuple[str, ...]
    mounts: tuple[Path, ...]
    cgroups: tuple[Path, ...]

    def __bool__(self) -> bool:
        return bool(self.processes or self.mounts or self.cgroups)

    def __str__(self) -> str:
        return "\n".join(str(each) for each in (*self.processes, *self.mounts, *self.cgroups))


def leftovers(base: Path, supervisor: int) -> Leftovers:
    """What is still there of the containerd of `base`, but for its supervisor, its root and its empty cgroup parent."""
    cgroups = cgroups_named(base.name, Path(f"/proc/{supervisor}/root{CGROUPS}"))
    return Leftovers(
        processes=tuple(f"{pid} {_command_line(pid)}" for pid in descendants(supervisor)),
        mounts=tuple(point for point in mounts_below(base, supervisor) if point != Layout(base).root),
        cgroups=tuple(cgroup for cgroup in cgroups if cgroup.name != base.name),
    )


def descendants(ancestor: int) -> list[int]:
    """Every living process below `ancestor`, zombies left out. Whole only for a subreaper: others lose orphans."""
    parents = dict(_parents())
    found = [ancestor]
    for pid in found:  # grows while we walk it: children, then theirs
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def members(name: str) -> list[int]:
    """Every process in the cgroups called `name`, and in those below."""
    files = (cgroup / "cgroup.procs" for cgroup in cgroups_named(name))
    return [int(pid) for file in files for pid in file.read_text().split()]


def mounts_below(base: Path, pid: int | str = "self") -> tuple[Path, ...]:
    """Mount points at or below `base` in the mount namespace of `pid`, newest first."""
    rows = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    points = (Path(OCTAL.sub(lambda code: chr(int(code[1], 8)), row.split()[4])) for row in rows)
    return tuple(reversed([point for point in points if point.is_relative_to(base)]))


def cgroups_named(name: str, root: Path = CGROUPS) -> tuple[Path, ...]:
    """The cgroups called `name` right below any hierarchy's root (all of v1, or v2), and those below, deepest first."""
    # v1 machines link cpu and cpuacct to one folder. Not resolved: `root` may lead into another mount namespace.
    tops = [
        top for top in (root / name, *sorted(root.glob(f"*/{name}"))) if top.is_dir() and not top.parent.is_symlink()
    ]
    return tuple(Path(folder) for top in tops for folder, _, _ in os.walk(top, topdown=False))


def kill_all(find: Callable[[], list[int]]) -> None:
    """SIGKILL what `find` names, until it names nothing: until all are dead, and none was born meanwhile."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def reap() -> None:
    """Collect every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def unmount_below(base: Path) -> None:
    """Detach every mount below `base` in our own mount namespace."""
    if points := mounts_below(base):  # a thousand where as many containers ran
        subprocess.run(["umount", "--lazy", *points], check=False, capture_output=True)


def remove_cgroups(name: str) -> None:
    """Remove the cgroups called `name`, and all below."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (found := cgroups_named(name)) and time.monotonic() < deadline:
        for cgroup in found:
            # Busy until the last of its killed processes is really gone.
            with contextlib.suppress(OSError):
                cgroup.rmdir()
        if cgroups_named(name):
            time.sleep(PAUSE_S)


def sweep() -> None:
    """Kill and remove every instance that an earlier run left: its supervisor no longer holds its lock."""
    for base in PARENT.glob(f"{PREFIX}*"):
        if (claim := _claim(base)) is not None:
            try:
                remove(base)
            finally:
                os.close(claim)


def remove(base: Path) -> None:
    """Remove an instance without its supervisor: what runs in its cgroup, or was started with its very paths."""
    layout = Layout(base)
    # containerd first, else it would go on starting what we kill
    kill_all(lambda: _started_with("--config", layout.config))
    kill_all(lambda: _started_with("-address", layout.cri_socket))
    kill_all(lambda: members(base.name))
    unmount_below(base)
    remove_cgroups(base.name)
    shutil.rmtree(base, ignore_errors=True)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid …", where the name may hold anything, parentheses too.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            yield int(folder.name), int(parent)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


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
