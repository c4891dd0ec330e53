"""Errors of GPUs on a real node: which of them take a GPU from the kubelet's count, and what brings it back."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import DAEMON, Cluster, pod, wait_for
from tests.support.daemon import FOUR_GPUS, UUIDS

pytestmark = pytest.mark.cluster

# Twice each, longer apart than reprobe_s: a program's crash, an unclear error and one that asks for nothing. And one
# that asks for a reset.
EVENTS = ((5, 0, 69), (10, 0, 69), (6, 1, 145), (11, 1, 145), (7, 2, 137), (12, 2, 137), (8, 3, 46))
NODE = FOUR_GPUS.read_text() + "".join(
    f"\n[[event]]\nat_s = {at_s}\ngpu = {gpu}\nxid = {xid}\n" for at_s, gpu, xid in EVENTS
)
POLICY = "[health]\nreprobe_s = 1\nhold_down_s = 5\n"


@pytest.mark.short
def test_only_what_asks_for_a_reset_takes_a_gpu_from_the_node(cluster: Cluster) -> None:
    """The kubelet counts the other three, and that one again after root's word."""
    cluster.run_daemon(NODE, POLICY)
    cluster.wait_allocatable(3)  # the kubelet's count of before may never be published
    wait_for("the last event", lambda: cluster.log(DAEMON).count("xid=137") == 2)
    cluster.apply(pod("three", 3))
    cluster.wait_phase("three")
    assert cluster.allocatable() == 3
    gpus = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)["gpus"]
    assert [gpu["health"]["state"] for gpu in gpus][::2] == ["healthy", "healthy"]
    assert gpus[3]["health"]["why"] == "XID 46, GPU stopped processing"
    done = cluster.nri_gpu("repaired", UUIDS[3])
    assert done.returncode == 0, done
    cluster.wait_allocatable(4)
    cluster.apply(pod("fourth", 1))
    cluster.wait_phase("fourth")
