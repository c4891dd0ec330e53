"""The processes that NVML lists, as /proc shows them: what they are called, whose they are, and their cgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.text import printable
from nri_gpu.stray.stray_controller import HIDDEN
from nri_gpu.system.proc import PROC, has_hosts_pids, living_thread, parse_cgroups, parse_stat
from nri_gpu.system.process import user_of
from nri_gpu.system.storage import text_of

UNTOLD: Final = f"{HIDDEN}; until then nobody can tell whose the processes on a GPU are"


class KnownProcess(Struct, frozen=True):
    """A process. started: tells it from a later one with its PID; clock ticks since boot. uid: the effective one.

    comm: the kernel's name for it, at most 15 bytes of any program's choice, made printable.
    """

    pid: int
    started: int
    uid: int | None
    comm: str
    cgroups: tuple[str, ...]


class ProcessLook(Struct, frozen=True):
    """A look at processes. same_pids: NVML's PIDs are ours. whole: no process is hidden: what is not seen, is gone."""

    processes: Mapping[int, KnownProcess] = {}
    same_pids: bool = True
    whole: bool = True


def look(
    pids: Iterable[int],
    before: Mapping[int, KnownProcess],
    proc: Path = PROC,
    hosts_pids: Callable[[], bool] = has_hosts_pids,
) -> ProcessLook:
    """Return those of these processes that can be seen. before: the last look's, which need not be read again."""
    if not hosts_pids():
        return ProcessLook(same_pids=False, whole=False)
    found = (_known(pid, before.get(pid), proc) for pid in pids)
    return ProcessLook({each.pid: each for each in found if each}, whole=(proc / "1/stat").exists())


def _known(pid: int, before: KnownProcess | None, proc: Path) -> KnownProcess | None:
    text = text_of(f"{proc}/{pid}/stat", encoding="utf-8")  # each second: pathlib costs half of it
    if not text:
        return None
    started, comm = parse_stat(text).started, printable(text.partition("(")[2].rpartition(")")[0])
    if before and before.started == started:
        return before if comm == before.comm else KnownProcess(pid, started, before.uid, comm, before.cgroups)
    cgroups = parse_cgroups(text_of(living_thread(pid, proc) / "cgroup", encoding="utf-8") or "")
    return KnownProcess(pid, started, user_of(pid, proc), comm, cgroups)
