"""MIG devices on both cgroup generations: their GPU's node, their two capabilities, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import cdi
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import TOPOLOGIES, Launch, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, check_opens, nvidia_nodes, open_paths

pytestmark = on_newest

TOPOLOGY: Final = TOPOLOGIES / "mig-a100.toml"
CAPS: Final = 1511
SHARED: Final = {(195, 255), (1510, 0), (1510, 1)}
# Of GPU 1, whose minor is 0: the two 1g.10gb, in GPU instances 9 and 10.
FIRST, SECOND = "MIG-12a10080-0000-5000-8000-090000000000", "MIG-13a10080-0000-5000-8000-0a0000000000"
FIRST_CAPS, SECOND_CAPS = {(CAPS, 84), (CAPS, 85)}, {(CAPS, 93), (CAPS, 94)}
PARENT: Final = (195, 0)


@pytest.fixture
def serving(cgroup_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    root = make_driver_root(tmp_path / "driver")
    with staged(Launch(tmp_path / "d", cgroup_node.nri_socket, topology=TOPOLOGY, driver_root=root)) as daemon:
        yield daemon


def check_sees(node: Containerd, container: ContainerId, granted: set[tuple[int, int]]) -> None:
    """These nodes and no other; these numbers open and no other capability does, not even MIG's configuration."""
    seen = nvidia_nodes(node.cri, container)
    assert set(seen.values()) == granted | SHARED
    assert all(f"nvidia-cap{minor}" in "".join(seen) for major, minor in granted if major == CAPS)
    assert set(open_paths(node.cri, container, seen).values()) == {Opened.NO_DRIVER}
    capabilities = {(CAPS, minor) for minor in (1, 2, 84, 85, 93, 94)}
    check_opens(node, container, granted | SHARED, capabilities | {(195, minor) for minor in range(4)})


@pytest.mark.short
def test_two_containers_on_two_mig_devices_of_one_gpu(cgroup_node: Containerd, serving: NriGpu) -> None:
    """Each exclusively, by index and by UUID; whoever asks for one of them next is refused."""
    one = cgroup_node.cri.run_asking("device=1:2", "one")
    two = cgroup_node.cri.run_asking(f"device={SECOND[:13]}", "two")
    check_sees(cgroup_node, one, {PARENT, *FIRST_CAPS})
    check_sees(cgroup_node, two, {PARENT, *SECOND_CAPS})
    for container, uuid in ((one, FIRST), (two, SECOND)):
        status = cgroup_node.cri.status(container)
        assert status.env["NVIDIA_VISIBLE_DEVICES"] == uuid
        assert not status.oci.get("hooks")
    serving.wait_held({"one/main": [FIRST], "two/main": [SECOND]})

    with pytest.raises(CriError, match=r"\[gpu-busy\]: MIG device 1:2 \(MIG-.* is held exclusively by default/one"):
        cgroup_node.cri.run_asking("device=1:2", "three")
    cgroup_node.cri.run_asking("mig=1g.10gb", "four")  # the one on GPU 2
    with pytest.raises(CriError, match=r"\[gpu-busy\]: asked for 1 1g.10gb MIG device in exclusive mode, but of the 3"):
        cgroup_node.cri.run_asking("mig=1g.10gb", "five")


def test_whole_gpus_bring_no_capabilities_and_those_in_mig_mode_stay(cgroup_node: Containerd, serving: NriGpu) -> None:
    container = cgroup_node.cri.run_asking("all", "whole")
    check_sees(cgroup_node, container, {(195, 1)})
    with pytest.raises(CriError, match=r"\[gpu-unavailable\]: GPU 1 .* it is in MIG mode"):
        cgroup_node.cri.run_asking("device=1", "cut")
    serving.wait_grants(1)


def test_cdi_gives_the_same_nodes(cgroup_node: Containerd, serving: NriGpu, tmp_path: Path) -> None:
    by_nri = cgroup_node.cri.run_asking("device=1:2,1:3; mode=shared", "by-nri")
    with cdi.specification(cgroup_node.layout.cdi, tmp_path / "driver", tmp_path / "stage", topology=TOPOLOGY):
        names = ("nvidia.com/gpu=1:2", f"nvidia.com/gpu={SECOND}")
        pod = cgroup_node.cri.run_pod(PodSpec(name="by-cdi"))
        by_cdi = cgroup_node.cri.run(pod, ContainerSpec(cdi_devices=names))
    assert nvidia_nodes(cgroup_node.cri, by_cdi) == nvidia_nodes(cgroup_node.cri, by_nri)
    check_sees(cgroup_node, by_cdi, {PARENT, *FIRST_CAPS, *SECOND_CAPS})
    with pytest.raises(CriError, match=r"\[gpu-busy\]: MIG device 1:2 .* default/by-cdi \(not through nri-gpu\)"):
        cgroup_node.cri.run_asking("device=1:2", "late")
    cgroup_node.cri.run_asking("device=1:0", "beside")  # of the same GPU, and its capability is not held by CDI
