"""Exclusive GPUs from one pod to the next, while the driver (a fake library) still shows processes."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.kernel import NriGpuOnNvidia
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, build_fake_nvml, configure
from tests.support.nvml.build import DRIVER
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = on_newest

PATIENCE_S: Final = 10.0  # long before the next regular look, which is a minute away, and the end of the grace


class Machine(Struct, frozen=True):
    """The daemon and the driver that it asks."""

    daemon: NriGpu
    driver: Path

    def processes(self, number: int) -> None:
        """So many on GPU 0 from now on."""
        configure(self.driver, [FakeGpu(running=(number, 0)), FakeGpu()])

    def unavailable(self, gpu: int = 0) -> str:
        """Why that GPU cannot be had, as `nri-gpu status` has it."""
        return str(self.daemon.status()["gpus"][gpu]["unavailable"])

    def status(self) -> str:
        return self.daemon.verb("status").stdout


@pytest.fixture
def machine(node: Containerd, tmp_path: Path) -> Iterator[Machine]:
    root = build_fake_nvml(make_driver_root(tmp_path / "driver", DRIVER), [FakeGpu(), FakeGpu()])
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    with NriGpuOnNvidia(launch, DRIVER) as daemon:
        daemon.wait_staged()
        daemon.wait_logged("inventory changed gpus=2")
        yield Machine(daemon, root)


def test_the_next_pod_waits_for_the_last_process(node: Containerd, machine: Machine) -> None:
    first = node.cri.run_asking("device=0", "first")
    machine.processes(2)
    node.cri.stop(first)

    said = "just released by default/first: 2 processes still hold it"
    wait_for("the look", lambda: machine.unavailable() == said, PATIENCE_S, machine.status)
    assert said in machine.status()
    with pytest.raises(CriError, match=rf"\[gpu-busy\]: GPU 0 \(GPU-.*\) was {said}; other pods can have it once"):
        node.cri.run_asking("device=0", "second")
    node.cri.run_asking("1", "beside")  # the other GPU

    machine.processes(0)
    wait_for("the hand-over", lambda: machine.unavailable() == "", PATIENCE_S, machine.status)
    node.cri.run_asking("device=0", "third")
    assert "held exclusively by default/third" in machine.unavailable()


def test_a_monitors_process_is_not_waited_for(node: Containerd, tmp_path: Path) -> None:
    """One that came after the container, as another process that is waited for did."""
    root = build_fake_nvml(make_driver_root(tmp_path / "driver", DRIVER), [FakeGpu()])
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    os.mknod(tmp_path / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    with NriGpuOnNvidia(launch.with_policy('[foreign]\nmonitors = ["default/exporter"]\n'), DRIVER) as daemon:
        daemon.wait_staged()
        daemon.wait_logged("inventory changed gpus=1")
        machine = Machine(daemon, root)
        first = node.cri.run_asking("device=0", "first")
        spec = ContainerSpec(devices={"/dev/nvidia0": str(tmp_path / "nvidia0")})
        exporter = node.cri.run(node.cri.run_pod(PodSpec(name="exporter")), spec)
        assert daemon.status()["gpus"][0]["monitors"] == ["default/exporter"]
        with subprocess.Popen(["sleep", "60"]) as other:
            configure(root, [FakeGpu(running=(1, 0), first_pid=other.pid)])
            node.cri.stop(first)
            said = "just released by default/first: 1 process still holds it"
            wait_for("the look", lambda: machine.unavailable() == said, PATIENCE_S, machine.status)
            other.kill()
        configure(root, [FakeGpu(running=(1, 0), first_pid=node.cri.status(exporter).pid)])
        wait_for("the hand-over", lambda: machine.unavailable() == "", PATIENCE_S, machine.status)
        node.cri.run_asking("device=0", "second")
