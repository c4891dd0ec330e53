"""A node with two kinds of GPU, each a resource of its own, beneath queued Jobs of both."""

import os

import pytest

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.inventory.topology_file import parse_topology
from tests.support.cluster import DAEMON, GPU, Cluster, Object, jobs, pod, wait_for
from tests.support.daemon import FOUR_GPUS

pytestmark = pytest.mark.cluster

L40S = "nvidia.com/l40s"
EACH = 6  # Jobs of each kind, for two GPUs
POOL = '[[pool]]\nname = "l40s"\nmodel = "*L40S*"\n'
KINDS = f'[kubelet]\nresources = {{"{L40S}" = "l40s"}}\n{POOL}'


def two_kinds() -> str:
    """The topology of four GPUs, the last two of which are of another model."""
    head, *gpus = FOUR_GPUS.read_text().split("[[gpu]]")
    model = next(line for line in gpus[0].splitlines() if line.startswith("model"))
    return "[[gpu]]".join([head, *gpus[:2], *(each.replace(model, 'model = "NVIDIA L40S"') for each in gpus[2:])])


def uuids(topology: str) -> list[GpuUuid]:
    return [gpu.uuid for gpu in parse_topology(topology, "kinds.toml", 1.0).gpus]


def queued(resource: str, kind: str, allowed: list[GpuUuid]) -> list[Object]:
    """Jobs of one pod each that fail, and are not tried again, where they get another GPU than one of these."""
    command = f'case "$NVIDIA_VISIBLE_DEVICES" in {"|".join(allowed)}) sleep 1;; *) exit 1;; esac'
    made = jobs([f"{kind}-{number}" for number in range(EACH)], command)
    for job in made:
        job["spec"]["backoffLimit"] = 0
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["resources"]["limits"] = {resource: 1}
    return made


def test_jobs_of_both_kinds_get_their_own(cluster: Cluster) -> None:
    topology = two_kinds()
    known = uuids(topology)
    cluster.run_daemon(topology, KINDS)
    cluster.run_guard()
    for resource in (GPU, L40S):
        cluster.wait_allocatable(2, resource)
    cluster.apply(*queued(GPU, "plain", known[:2]), *queued(L40S, "l40s", known[2:]))
    wait_for("all Jobs", lambda: cluster.jobs_done() == 2 * EACH, 180, lambda: cluster.kubectl("get", "jobs,pods"))
    assert not any(job["status"].get("failed") for job in cluster.get("jobs"))

    cluster.apply(pod("plain", 2), pod("l40s", 1, L40S), pod("other", 1, L40S))
    cluster.wait_running("plain", "l40s", "other")
    assert cluster.minors("plain") == {0, 1}
    kept = cluster.minors("l40s")
    assert kept | cluster.minors("other") == {2, 3}
    cluster.apply(pod("more", 1, L40S))
    cluster.wait_said("more", f"Insufficient {L40S}")
    cluster.kubectl("delete", "pod", "more", "other", "plain")

    # The policy names one resource for all again: what was allocated by the other name stays its pod's.
    cluster.stop(DAEMON)
    cluster.run_daemon(topology, POOL)
    cluster.wait_allocatable(3)
    cluster.wait_allocatable(0, L40S)
    os.kill(cluster.pids("l40s")[0], 9)
    cluster.wait_phase("l40s", restarts=1)
    assert cluster.minors("l40s") == kept
    cluster.apply(pod("rest", 3))
    cluster.wait_running("rest")
    assert cluster.minors("rest") == {0, 1, 2, 3} - kept
    cluster.kubectl("delete", "pod", "l40s")
    cluster.wait_allocatable(4)
