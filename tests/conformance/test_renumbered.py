"""A driver that is loaded again, and MIG devices that are made again, under a container that runs.

What its cgroup opens is another GPU then, which nobody is granted exclusively as long as that container lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES, Launch, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.probe import Opened, open_number
from tests.support.waiting import wait_for

pytestmark = on_newest

MIG: Final = TOPOLOGIES / "mig-a100.toml"
MADE_AGAIN: Final = ("MIG-12a10080-0000-5000-8000-090000000000", "MIG-99999999-0000-5000-8000-090000000000")


@pytest.fixture
def topology(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(request.param.read_text())
    return file


@pytest.fixture
def serving(node: Containerd, tmp_path: Path, topology: Path) -> Iterator[NriGpu]:
    root = make_driver_root(tmp_path / "driver")
    with staged(Launch(tmp_path / "d", node.nri_socket, topology=topology, driver_root=root)) as daemon:
        yield daemon


def change(daemon: NriGpu, topology: Path, *swapped: tuple[str, str]) -> None:
    """Edit the node, and wait until the daemon knows it."""
    text, before = topology.read_text(), daemon.status()["node"]["inventory_number"]
    for old, new in swapped:
        assert text.count(old) == 1
        text = text.replace(old, new)
    topology.write_text(text)
    wait_for("the new node", lambda: daemon.status()["node"]["inventory_number"] > before, 20)


@pytest.mark.parametrize("topology", [FOUR_GPUS], indirect=True)
def test_gpus_change_their_minors(node: Containerd, serving: NriGpu, topology: Path) -> None:
    old = node.cri.run_asking("device=1", "old")
    change(serving, topology, ("\nminor = 1\n", "\nminor = 9\n"), ("\nminor = 0 ", "\nminor = 1 "), ("= 9\n", "= 0\n"))
    assert open_number(node.cri, old, 195, 1) is Opened.NO_DRIVER  # the cgroup lets it, and that is GPU 0 by now
    held = r"\[gpu-busy\]: GPU 0 \(GPU-.*\) is held by default/old \(container main still opens its device number\)"
    with pytest.raises(CriError, match=held):
        node.cri.run_asking("device=0", "late")
    first, second, *_ = serving.status()["gpus"]
    assert first["opened_by"] == [{"pod": "default/old", "container": "main"}]
    assert [each["pod"] for each in second["holders"]] == ["old"]
    proof = serving.verb("verify", "--containerd-state", str(node.base / "state"))
    assert proof.returncode == 1
    assert "default/old main: can open /dev/nvidia1 (195:1, GPU 0, " in proof.stdout
    assert "the driver has been reloaded since" in proof.stdout
    node.cri.run_asking("device=2", "beside")  # 195:255 and nvidia-uvm are everybody's
    node.cri.run_asking("device=0; mode=shared", "sharing")

    serving.restart()
    serving.wait_logged("driver files staged")
    with pytest.raises(CriError, match=r"default/old \(container main still opens its device number\)|in shared mode"):
        node.cri.run_asking("device=0", "later")
    assert serving.status()["gpus"][0]["opened_by"]
    for name in ("old", "sharing"):
        node.cri.remove_pod_named(name)
    node.cri.run_asking("device=0", "next")


@pytest.mark.parametrize("topology", [MIG], indirect=True)
def test_a_mig_device_is_made_again(node: Containerd, serving: NriGpu, topology: Path) -> None:
    old = node.cri.run_asking("device=1:2", "old")
    change(serving, topology, MADE_AGAIN)
    held = rf"\[gpu-busy\]: MIG device 1:2 \({MADE_AGAIN[1]}\) is held by default/old \(container main still opens"
    with pytest.raises(CriError, match=held):
        node.cri.run_asking("device=1:2", "late")
    node.cri.run_asking("device=1:3", "beside")  # through the same node of its GPU, and another capability
    node.cri.remove(old)
    node.cri.run_asking("device=1:2", "next")
