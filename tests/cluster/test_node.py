"""The kubelet's device plugin and the injector on a real kubelet, scheduler and containerd."""

import pytest

from tests.support.cluster import GPU, Cluster, pod

pytestmark = pytest.mark.cluster


def test_pods_get_the_gpus_that_the_kubelet_chose_and_no_others(cluster: Cluster) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(4)
    names = ("one", "two", "three")
    cluster.apply(*(pod(name, gpus) for name, gpus in zip(names, (1, 1, 2), strict=True)), pod("none"))
    for name in (*names, "none"):
        cluster.wait_phase(name)
    granted = [cluster.minors(name) for name in names]
    assert [len(minors) for minors in granted] == [1, 1, 2]
    assert frozenset().union(*granted) == frozenset(range(4))
    assert cluster.minors("none") == frozenset()
    cluster.apply(pod("fifth", 1))
    cluster.wait_said("fifth", f"Insufficient {GPU}")
