"""Processes as /proc shows them: a name that anybody may choose, and a PID that is soon another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.system.proc import has_hosts_pids
from nri_gpu.usage.sampled_processes import KnownProcess, look
from tests.support.files import write_files

STAT = "7 ({}) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 {} 0"


def yes() -> bool:
    return True


def process(proc: Path, comm: str, started: int = 500) -> Path:
    files = {
        "7/stat": STAT.format(comm, started),
        "7/status": "Name:\tx\nUid:\t1000\t1001\t0\t0\n",
        "7/cgroup": "0::/kubepods/pod1/main\n",
        "1/stat": STAT.format("init", 1),
    }
    return write_files(proc, files)


@pytest.mark.parametrize(
    ("comm", "shown"),
    [("python3", "python3"), ("a) S (b", "a) S (b"), ("\x1b[2J", "?[2J"), ("a\nb", "a?b"), ("é", "é")],
)
def test_what_a_process_is(tmp_path: Path, comm: str, shown: str) -> None:
    seen = look([7, 8], {}, process(tmp_path, comm), yes)
    assert seen.processes == {7: KnownProcess(7, 500, 1001, shown, ("/kubepods/pod1/main",))}
    assert seen.whole


def test_what_is_known_is_not_read_again_but_the_name(tmp_path: Path) -> None:
    before = look([7], {}, process(tmp_path, "sh"), yes).processes
    (tmp_path / "7/cgroup").unlink()
    after = look([7], before, process(tmp_path, "train"), yes).processes[7]
    assert (after.comm, after.cgroups) == ("train", before[7].cgroups)


def test_a_pid_that_is_anothers_is_read_again(tmp_path: Path) -> None:
    before = {7: KnownProcess(7, 499, 0, "sh", ("/other",))}
    after = look([7], before, process(tmp_path, "sh"), yes).processes[7]
    assert (after.started, after.cgroups) == (500, ("/kubepods/pod1/main",))


def test_hidden_processes_are_told_from_those_that_are_gone(tmp_path: Path) -> None:
    assert not look([8], {}, tmp_path, yes).whole


def test_pids_of_another_namespace_are_not_looked_for(tmp_path: Path) -> None:
    seen = look([7], {}, process(tmp_path, "sh"), lambda: False)
    assert (seen.processes, seen.same_pids, seen.whole) == ({}, False, False)


@pytest.mark.skipif(not has_hosts_pids(), reason="needs the host's PIDs")
def test_this_process() -> None:
    found = look([os.getpid()], {}).processes[os.getpid()]
    assert (found.comm, found.uid) == (Path("/proc/self/comm").read_text().strip(), os.geteuid())


@pytest.mark.parametrize("name", ["a\rUid:", "a\vUid:\t0\t0\t0\t0"])
def test_no_name_is_taken_for_a_user(tmp_path: Path, name: str) -> None:
    """The kernel escapes line feeds in it, and nothing else that ends a line."""
    write_files(process(tmp_path, "sh"), {"7/status": f"Name:\t{name}\nUid:\t1000\t1001\t0\t0\n"})
    assert look([7], {}, tmp_path, yes).processes[7].uid == 1001
