"""nri-gpu-prepare.service: comes before who needs it, and has the rights for its job and no more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.host.facts import KernelModule
from nri_gpu.host.make_nodes import LOAD_TIMEOUT_S
from tests.support.unit_file import OURS
from tests.support.unit_file import Unit as UnitFile
from tests.unit.host.host_tree import CAPS, NVIDIA, UVM, HostTree, host_below, params

PATH = OURS.with_name("nri-gpu-prepare.service")
UNIT = UnitFile.read(PATH)
MAIN = UnitFile.read()
PROJECT = OURS.parents[1]


def test_all_who_need_nodes_come_after_it() -> None:
    snaps = {"snap.microk8s.daemon-kubelite.service", "snap.k8s.kubelet.service", "snap.docker.dockerd.service"}
    assert {"nri-gpu.service", "kubelet.service", "docker.service", *snaps} <= set(UNIT.words("Before"))
    assert UNIT.value("Type") == "oneshot"
    # The same things go before both; one of ours in the other's After= as well would be a circle.
    assert not set(UNIT.words("Before")) & set(UNIT.words("After"))


def test_it_never_keeps_the_daemon_from_starting() -> None:
    """Neither by failing nor by running again when only the daemon is restarted."""
    for unit in (UNIT, MAIN):
        assert not [key for key in ("Requires", "BindsTo", "PartOf", "Requisite", "RequiredBy") if unit.values(key)]
    assert UNIT.value("RemainAfterExit") == "yes"
    assert UNIT.words("WantedBy") == ["multi-user.target"]


def test_its_time_is_enough_for_every_module() -> None:
    assert LOAD_TIMEOUT_S * len(KernelModule) < int(UNIT.value("TimeoutStartSec")) <= 300


def test_it_may_make_any_node_and_open_none() -> None:
    assert UNIT.value("DevicePolicy") == "closed"
    assert UNIT.values("DeviceAllow") == ["char-* m"]
    assert UNIT.value("ProtectKernelModules") != "yes"
    assert UNIT.value("PrivateDevices") != "yes"


def confined(host: HostTree, unit: Path) -> subprocess.CompletedProcess[str]:
    """Prepare as a unit would. A real modprobe is not run, nor are cgroups set: the kernel's own part is left out."""
    command = [sys.executable, "-m", "tests.unit.host.confined", str(host.base), str(unit)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def worn(tmp_path: Path) -> HostTree:
    """A host that needs everything done at once, owners that are not root's among it."""
    host = host_below(tmp_path)
    host.mig("gpu0/gi1", 12)
    host.write("waiting/nvidia/proc/driver/nvidia/params", params(uid=7, gid=44, mode=0o660))
    host.node("nvidia1", NVIDIA, 9)
    host.node("nvidia-uvm", UVM, 0, 0o600)
    return host


def test_its_rights_and_calls_are_enough(worn: HostTree) -> None:
    done = confined(worn, PATH)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    nodes = {path: str(entry) for path, entry in worn.entries().items() if "nvidia" in path and path != "nvidia-caps"}
    own = "mode 0660, owner 7:44"
    assert nodes == {
        "nvidiactl": f"char {NVIDIA}:255, {own}",
        "nvidia0": f"char {NVIDIA}:0, {own}",
        "nvidia1": f"char {NVIDIA}:1, {own}",
        "nvidia-modeset": f"char {NVIDIA}:254, {own}",
        "nvidia-uvm": f"char {UVM}:0, mode 0666, owner 0:0",
        "nvidia-uvm-tools": f"char {UVM}:1, mode 0666, owner 0:0",
        "nvidia-caps/nvidia-cap12": f"char {CAPS}:12, mode 0444, owner 0:0",
    }


@pytest.mark.parametrize("lost", ["CAP_MKNOD", "CAP_CHOWN", "CAP_FOWNER"])
def test_none_of_its_rights_is_too_much(worn: HostTree, tmp_path: Path, lost: str) -> None:
    """CAP_SYS_MODULE is for a real modprobe to need."""
    unit = tmp_path / PATH.name
    unit.write_text(re.sub(rf"\b{lost}\b ?", "", PATH.read_text()))
    done = confined(worn, unit)
    assert done.returncode == Exit.FINDING
    assert "Operation not permitted" in done.stdout
    assert done.stderr == ""
