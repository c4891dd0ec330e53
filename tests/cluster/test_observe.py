"""The observer beside NVIDIA's DRA driver and a device plugin on a real Kubernetes: who gave what to whom."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, pod, wait_for
from tests.support.cluster_claims import claim, on_claim
from tests.support.daemon import UUIDS
from tests.support.nvidia_dra import SET, asked
from tests.support.observed_cluster import RESOURCE, ObservedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.ground(SET)]


@pytest.mark.short
def test_who_was_given_which_gpu_and_by_whom(cluster: Cluster, observed: ObservedCluster) -> None:
    observed.run()
    cluster.apply(claim("big", asked()), on_claim("claimed", "big"), pod("plugged", 1, RESOURCE), pod("plain"))
    cluster.wait_running("claimed", "plugged", "plain")
    expected = {
        (name, UUIDS[minor]): by
        for name, by in (
            ("claimed", ("DRA driver gpu.nvidia.com", "default/big")),
            ("plugged", (f"device plugin {RESOURCE}", "")),
        )
        for minor in cluster.minors(name)
    }
    assert len(expected) == 2
    wait_for("both", lambda: observed.allocations() == expected, explain=lambda: str(observed.status()["observer"]))
    assert observed.status()["node"]["observed"] is True

    cluster.kubectl("delete", "pod", "claimed", "plugged")
    wait_for("none", lambda: not observed.allocations(), explain=lambda: str(observed.status()["observer"]))
