"""`nri-gpu blockers` on a real containerd: a container with a node keeps the driver, whether it runs or not."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.domain.errors import Exit
from tests.conformance.conftest import launch_on
from tests.support import cdi, packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import READY_S, staged
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.files import write_files
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.runc_gate import Gate
from tests.support.schemas import conforming

pytestmark = on_newest

STATIC_UID: Final = "0123456789abcdef0123456789abcdef"
HOST: Final = {
    "proc/devices": "Character devices:\n195 nvidia\n1510 nvidia-uvm\n",
    "sys/module/nvidia/version": "580.95.05\n",
    "sys/module/nvidia/refcnt": "0\n",
    "etc/kubernetes/manifests/agent.yaml": "apiVersion: v1\nkind: Pod\nmetadata:\n  name: agent\n",
}


def reported(state: Path, host: Path) -> tuple[int, list[Any]]:
    """The exit code, and who keeps the driver loaded."""
    command = [sys.executable, "-m", "nri_gpu", "blockers", "--root", str(host), "-o", "json"]
    command += ["--containerd-state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, conforming(json.loads(done.stdout))["keeps_loaded"]


def blockers(node: Containerd, host: Path) -> tuple[int, dict[str, Any]]:
    """The same, by pods."""
    code, found = reported(node.base / "state", host)
    return code, {each["pod"]: each for each in found}


@pytest.mark.short
def test_created_running_and_paused_containers(runtime: packages.Runtime, folder: Path, tmp_path: Path) -> None:
    gate, host = Gate(folder), write_files(tmp_path / "host", HOST)
    with (
        Containerd(runtime, runc=gate.runc) as node,
        staged(launch_on(node, folder)),
        ThreadPoolExecutor(1) as beside,
    ):
        node.cri.run(node.cri.run_pod(PodSpec(name="web")), ContainerSpec())
        agent = node.cri.run_pod(PodSpec(name="kube-proxy", privileged=True))
        node.cri.run(agent, ContainerSpec(privileged=True))
        assert blockers(node, host)[1] == {}

        running = node.cri.run_asking("device=0", "running")
        paused = node.cri.run_asking("device=1", "paused")
        static = node.cri.run(node.cri.asking("device=2", "agent-node1", uid=STATIC_UID))
        created = node.cri.create(node.cri.asking("device=3", "created"))
        assert "created" not in blockers(node, host)[1]  # containerd has told its runtime nothing of it
        node.ctr("task", "pause", paused)
        with gate.shut():
            starting = beside.submit(node.cri.start, created)
            gate.wait_reached()
            code, found = blockers(node, host)
        starting.result(READY_S)
        node.ctr("task", "resume", paused)

        ids = {"running": running, "paused": paused, "agent-node1": static, "created": created}
        assert code == Exit.FINDING
        assert {pod: [ContainerId(id_) for id_ in each["container_ids"]] for pod, each in found.items()} == {
            pod: [id_] for pod, id_ in ids.items()
        }
        assert "/dev/nvidia3" in found["created"]["nodes"]
        assert found["created"]["next"][-1] == "kubectl -n default delete pod created"
        assert found["agent-node1"]["next"][0] == "mv /etc/kubernetes/manifests/agent.yaml /root/"

        for container in ids.values():
            node.cri.stop(container)
        assert blockers(node, host)[1] == {}


def test_containers_of_docker(tmp_path: Path) -> None:
    """By CDI, running and paused; a privileged one without a GPU, and one that has nothing of it, are not named."""
    host = write_files(tmp_path / "host", HOST)
    driver = make_driver_root(tmp_path / "driver")
    with Docker() as docker, cdi.specification(docker.cdi, driver, tmp_path / "stage"):
        docker.load()
        running, paused = (docker.run("--device", f"nvidia.com/gpu={index}") for index in (0, 1))
        docker("pause", paused)
        for options in ((), ("--privileged",)):
            docker.run(*options)
        code, found = reported(docker.base / "exec/containerd/daemon", host)
        docker("unpause", paused)
    assert code == Exit.FINDING
    assert {(each["kind"], *each["next"]) for each in found} == {
        ("container", f"docker stop {id_}") for id_ in (running, paused)
    }
    assert all("/dev/nvidiactl" in each["nodes"] and each["mounts"] for each in found)
