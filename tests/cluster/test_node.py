"""What pods get on a real kubelet, scheduler and containerd, with all daemons up."""

import asyncio
import os
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import GpuUuid
from tests.support.cluster import DAEMON, GPU, Cluster, pod, wait_for
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.kubelet import Rival

pytestmark = pytest.mark.cluster

MIG = "nvidia.com/mig-1g.10gb"


@pytest.mark.short
def test_pods_get_the_gpus_that_the_kubelet_chose_and_no_others(cluster: Cluster) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(4)
    names = ("one", "two", "three")
    cluster.apply(*(pod(name, gpus) for name, gpus in zip(names, (1, 1, 2), strict=True)), pod("none"))
    cluster.wait_running(*names, "none")
    granted = [cluster.minors(name) for name in names]
    assert [len(minors) for minors in granted] == [1, 1, 2]
    assert frozenset().union(*granted) == frozenset(range(4))
    assert cluster.minors("none") == frozenset()
    cluster.apply(pod("fifth", 1))
    cluster.wait_said("fifth", f"Insufficient {GPU}")


def test_mig_devices_are_a_resource_for_each_profile(cluster: Cluster) -> None:
    cluster.run_daemon(TOPOLOGIES / "mig-a100.toml", '[kubelet]\nmig_strategy = "mixed"\n')
    cluster.wait_allocatable(3, MIG)
    cluster.wait_allocatable(1)  # the one GPU that is not in MIG mode
    cluster.apply(pod("slice", 1, MIG), pod("other", 1, MIG), pod("whole", 1))
    cluster.check_mig()


def test_a_gpu_that_is_lost_is_withheld_and_said_of_the_pod_that_has_it(cluster: Cluster) -> None:
    cluster.run_daemon()
    cluster.wait_allocatable(4)
    cluster.apply(pod("all", 4))
    cluster.wait_phase("all")
    cluster.stop(DAEMON)
    lost = '[[gpu]]\nunavailable = "GPU is lost"\nsigns = ["lost"]\n'
    cluster.run_daemon(FOUR_GPUS.read_text().replace("[[gpu]]\n", lost))
    cluster.wait_allocatable(0)
    (status,) = cluster.get("pod", "all")["status"]["containerStatuses"]
    (shown,) = status["allocatedResourcesStatus"]
    assert [each["health"] for each in shown["resources"]] == ["Unhealthy"] * 4
    # Nothing that runs is ended. Its container's next start is refused, and says what helps.
    os.kill(cluster.pids("all")[0], 9)
    cluster.wait_said("all", "delete the pod")


def test_another_device_plugin_of_the_same_resource(cluster: Cluster) -> None:
    cluster.run_daemon()
    cluster.wait_allocatable(4)
    asyncio.run(_beside_a_rival(cluster))
    cluster.wait_allocatable(4)
    cluster.apply(pod("after", 4))
    cluster.wait_phase("after")


async def _beside_a_rival(cluster: Cluster) -> None:
    folder: Path = cluster.root / "lib-kubelet" / "device-plugins"
    async with Rival(folder, GPU, [GpuUuid("GPU-theirs")]) as rival:
        await rival.register()
        await asyncio.to_thread(cluster.wait_allocatable, 1)
        said = "is NVIDIA's device plugin and serves nvidia.com/gpu already"
        await asyncio.to_thread(wait_for, "a warning", lambda: said in cluster.log(DAEMON))
