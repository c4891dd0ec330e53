"""Which cgroup is a container's own, and whether a process is left in it: on this kernel, in both generations."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.system.cgroups import DEVICES, UNIFIED, ContainerCgroups, Mounted, hierarchies, mounts_of
from nri_gpu.system.process import process_of
from tests.support.cgroup import OccupiedCgroup
from tests.support.waiting import wait_for

ID = ContainerId("c0ffee")
SCOPE = f"cri-containerd-{ID}.scope"
MOUNTS = mounts_of("self")


@pytest.fixture(params=[DEVICES, UNIFIED], ids=["v1", "v2"])
def tree(request: pytest.FixtureRequest) -> Iterator[OccupiedCgroup]:
    if request.param not in hierarchies(MOUNTS) or os.geteuid():
        pytest.skip("this machine does not let us make cgroups of that generation")
    made = OccupiedCgroup(request.param, SCOPE)
    yield made
    made.remove()


def test_a_container_lives_as_long_as_a_process_is_in_its_cgroup_or_below(tree: OccupiedCgroup) -> None:
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    first = cgroups.first_process(tree.process.pid, ID)
    assert first
    assert first.cgroup
    assert first.cgroup.path == f"/{tree.top.name}/{SCOPE}"
    assert cgroups.named([ID, ContainerId("other")])[ID].cgroup == first.cgroup
    assert cgroups.lives(first)
    assert cgroups.pids(first, 8) == (tree.process.pid,)
    tree.end()
    assert not cgroups.lives(first)
    tree.remove()
    assert not cgroups.lives(first)  # gone is empty


def test_where_its_cgroup_is_not_seen_its_first_process_counts() -> None:
    process = subprocess.Popen(["sleep", "600"])
    cgroups = ContainerCgroups((), same_pids=True)
    first = cgroups.first_process(process.pid, ID)
    assert first == FirstProcess(process.pid, getattr(process_of(process.pid), "started", 0))
    assert cgroups.lives(first)
    assert not cgroups.lives(FirstProcess(first.pid, first.started + 1))  # another with its PID
    process.kill()
    wait_for("its end", lambda: not cgroups.lives(first), 5)
    process.wait()


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (f"0::/kubepods/besteffort/pod1/{ID}", f"/kubepods/besteffort/pod1/{ID}"),
        (f"0::/kubepods.slice/crio-{ID}.scope/container", f"/kubepods.slice/crio-{ID}.scope"),
        (f"0::/../../kubepods/{ID}", None),  # above what is mounted here
        (f"0::/kubepods/{ID}0", None),
        (f"0::/kubepods/x{ID}", None),
        (f"0::/kubepods.slice/crio-conmon-{ID}.scope", None),  # of its monitor
        (f"5:devices:/{ID}", None),  # whose list of PIDs would be empty for us
    ],
)
def test_what_a_pod_sees_by_the_hosts_proc(tmp_path: Path, line: str, path: str | None) -> None:
    """Without the host's PIDs: by a second /proc, and only where the cgroup is the container's."""
    (tmp_path / "41").mkdir()
    (tmp_path / "41/stat").write_text("41 (a) b) S " + " ".join("0" * 18) + " 1234 0\n")
    (tmp_path / "41/cgroup").write_text(line + "\n")
    kinds = {"/sys/fs/cgroup": "cgroup2", "/devices": "cgroup", str(tmp_path): "proc"}
    mounts = [Mounted("0:1", "/", place, kind, frozenset({DEVICES})) for place, kind in kinds.items()]
    first = ContainerCgroups(mounts).first_process(41, ID)
    assert first == (FirstProcess(41, 1234, Cgroup(UNIFIED, path)) if path else None)
    assert ContainerCgroups(mounts[:2]).first_process(41, ID) is None
