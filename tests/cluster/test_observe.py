"""The observer beside NVIDIA's DRA driver and a device plugin on a real Kubernetes: who gave what to whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from tests.support.cluster import Cluster, Object, pod, wait_for
from tests.support.cluster_claims import claim, on_claim
from tests.support.daemon import UUIDS
from tests.support.nvidia_dra import SET, asked
from tests.support.observed_cluster import OBSERVER, RESOURCE, ObservedCluster, allocations

pytestmark = [pytest.mark.cluster, pytest.mark.ground(SET)]

BY_DRIVER: Final = ("DRA driver gpu.nvidia.com", "default/big")
BY_PLUGIN: Final = (f"device plugin {RESOURCE}", "")
# Prints each socket in a container's file system.
FIND_SOCKETS: Final = """
import os, stat
for folder, folders, names in os.walk("/"):
    folders[:] = [each for each in folders if os.path.join(folder, each) not in ("/proc", "/sys")]
    for path in (os.path.join(folder, name) for name in sorted(names)):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            print(path)
"""


def _start_pods(cluster: Cluster) -> Mapping[tuple[str, str], tuple[str, str]]:
    """A pod with a claim, one of the device plugin and one without a GPU. Returns what an observer knows of them."""
    cluster.apply(claim("big", asked()), on_claim("claimed", "big"), pod("plugged", 1, RESOURCE), pod("plain"))
    cluster.wait_running("claimed", "plugged", "plain")
    found = {"claimed": BY_DRIVER, "plugged": BY_PLUGIN}
    given = {(name, UUIDS[minor]): by for name, by in found.items() for minor in cluster.minors(name)}
    assert len(given) == len(found)
    return given


def _wait_allocations(status: Callable[[], Object], given: Mapping[tuple[str, str], tuple[str, str]]) -> None:
    wait_for("allocations", lambda: allocations(status()) == given, explain=lambda: json.dumps(status()["observer"]))


@pytest.mark.short
def test_who_was_given_which_gpu_and_by_whom(cluster: Cluster, observed: ObservedCluster) -> None:
    observed.run()
    _wait_allocations(observed.status, _start_pods(cluster))
    assert observed.status()["node"]["observed"] is True
    cluster.kubectl("delete", "pod", "claimed", "plugged")
    _wait_allocations(observed.status, {})


def test_a_kubelet_that_is_away_takes_nothing_back(cluster: Cluster, observed: ObservedCluster) -> None:
    observed.run()
    given = _start_pods(cluster)
    _wait_allocations(observed.status, given)
    cluster.stop("kubelet")

    def said() -> list[str]:
        return [each for each in observed.status()["observer"]["unseen"] if "kubelet" in each]

    cluster.verb("ctr", "task", "kill", "--signal", "KILL", cluster.container_id("plain"))  # so that it looks again
    wait_for("a fault of the kubelet", lambda: bool(said()), explain=lambda: cluster.log(OBSERVER)[-3000:])
    assert allocations(observed.status()) == given
    cluster.start("kubelet")
    wait_for("the kubelet again", lambda: not said())
    assert allocations(observed.status()) == given


@pytest.mark.parametrize("nvml", [False, True])
def test_the_charts_observer_sees_the_same_and_holds_nothing(
    cluster: Cluster, observed: ObservedCluster, image: None, nvml: bool
) -> None:
    """No socket of a runtime is in its pod, and no file system of a container stays mounted there."""
    cluster.apply(pod("before"))
    cluster.wait_running("before")
    before = cluster.container_id("before")
    cluster.install(mode="observe", observe={"nvml": nvml})
    _wait_allocations(observed.chart_status, _start_pods(cluster))
    sockets = observed.in_pod("python3", "-c", FIND_SOCKETS).split()
    doctor = json.loads(observed.in_pod("nri-gpu", "doctor", "-o", "json"))
    assert doctor["counts"]["error"] == 0, doctor
    assert "observer" in [each["name"] for each in doctor["sections"]]
    assert sorted(sockets) == ["/run/nri-gpu-observe/control.sock", "/var/lib/kubelet/pod-resources/kubelet.sock"]

    cluster.kubectl("delete", "pod", "before")
    wait_for("its mounts to go", lambda: before not in observed.in_pod("cat", "/proc/self/mountinfo"))
