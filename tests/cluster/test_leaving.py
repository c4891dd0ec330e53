"""Nodes that change: from the device plugin to claims, and to life without nri-gpu."""

import time

import pytest

from tests.support.cluster import DAEMON, Cluster, pod
from tests.support.cluster_claims import DraCluster
from tests.support.pages import commands

pytestmark = pytest.mark.cluster

KEPT_S = 300  # a device plugin's resources, by the kubelet after its end
STATUS_S = 15  # until the node's status says so
REMEMBERED = "endpoint not found in cache for a registered resource: nvidia.com/gpu"
FORGET = "From the device plugin"


def test_a_kubelet_that_remembers_a_device_plugin_starts_no_such_pod_by_claims(
    cluster: Cluster, dra: DraCluster
) -> None:
    """What the checkpoint does, that `doctor` says so, and that the commands of docs/dra.md mend it."""
    cluster.run_daemon()
    cluster.wait_allocatable(4)
    cluster.apply(pod("counted", 1))
    cluster.wait_phase("counted")
    cluster.stop(DAEMON)  # before anybody asks the kubelet's PodResources, which would make it forget
    cluster.kubectl("delete", "pod", "counted")
    dra.run_daemon()
    dra.run_driver()
    dra.wait_devices("offered", lambda found: len(found) == 4)  # one is held for the pod that is gone
    time.sleep(KEPT_S + STATUS_S)
    cluster.apply(pod("train", 1))
    cluster.wait_said("train", REMEMBERED)
    assert "a device plugin, and claims allocate on this node" in cluster.nri_gpu("doctor").stdout
    cluster.stop("kubelet")
    cluster.start("kubelet")
    cluster.wait_said("train", REMEMBERED)

    cluster.stop("kubelet")
    for line in commands("dra.md", FORGET):
        cluster.verb("enter", "bash", "-c", line)
    cluster.start("kubelet")
    cluster.wait_phase("train")
    assert len(cluster.minors("train")) == 1
    assert "kubelet checkpoint" not in cluster.nri_gpu("doctor").stdout
    cluster.kubectl("delete", "pod", "train")
