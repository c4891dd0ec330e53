"""A second nri-gpu beside the node's own: a simulation disturbs nobody, and one on the same runtime is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch, NriGpu, Simulation
from tests.support.pods import ContainerSpec

pytestmark = pytest.mark.containerd
SECOND = "another nri-gpu serves this runtime"


def beside(launch: Launch, tmp_path: Path) -> Launch:
    return Launch(tmp_path / "second", launch.socket, driver_root=launch.driver_root, index="20")


def test_a_simulation_beside_it_costs_no_pod_a_gpu(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    with Simulation(beside(daemon.launch, tmp_path), "--socket", "--stage-dir", "--state-dir") as simulation:
        simulation.wait_ready()
        node.cri.run_asking("device=0")
        daemon.wait_held({"pod/main": [UUIDS[0]]})
        assert daemon.verb("status").returncode == Exit.OK
    assert SECOND not in daemon.log() + simulation.log()


def test_two_on_one_runtime_are_told_by_what_no_pod_can_make(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    with NriGpu(beside(daemon.launch, tmp_path)) as second:
        second.wait_staged()
        assert second.wait_logged(SECOND).endswith(f" pids={daemon.pid}")
        assert "or a second nri-gpu: see `nri-gpu doctor`" in node.cri.refused("device=0", "asks").details
        node.cri.run(node.cri.run_pod(), ContainerSpec(name="plain"))
        if node.runtime.number >= (2, 2):  # NRI 0.10
            assert "10-nri-gpu and 20-nri-gpu" in daemon.wait_logged(SECOND)
            assert "two nri-gpu serve this runtime" in daemon.verb("status").stdout
        said = json.loads(daemon.verb("doctor", "-o", "json").stdout)
        (found,) = [
            each for part in said["sections"] for each in part["findings"] if each["subject"] == "second nri-gpu"
        ]
        assert all(str(each.pid) in found["meaning"] for each in (daemon, second))
    node.cri.run_asking("device=0", "again")
    node.cri.run(node.cri.run_pod(), ContainerSpec(name="plain"))
    assert "two nri-gpu" not in daemon.verb("status").stdout
