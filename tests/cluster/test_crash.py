"""Daemons that die while Jobs come and go, a node that loses its power, a kubelet whose folder lies elsewhere."""

from typing import Any

import pytest

from tests.support.cluster import DAEMON, GUARD, Cluster, Uses, jobs, pod, wait_for

pytestmark = pytest.mark.cluster

QUEUED = 12


@pytest.mark.parametrize("victim", [DAEMON, GUARD, "kubelet", "containerd"])
def test_a_daemon_that_is_killed_costs_no_job_and_no_gpu_is_given_twice(cluster: Cluster, victim: str) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(4)
    uses = Uses(cluster.folder / f"record-{victim}")
    queued = jobs([f"job-{number}" for number in range(QUEUED)], "")
    for job in queued:
        uses.written_by(job["spec"]["template"]["spec"], 2)
    cluster.apply(*queued)

    def explain() -> str:
        states = cluster.kubectl(
            "get", "pods", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status}{'\\n'}{end}"
        )
        return "\n".join([states, *(cluster.log(name)[-9000:] for name in (DAEMON, GUARD, "containerd"))])

    wait_for("the first Jobs to end", lambda: cluster.jobs_done() >= 2)
    cluster.kill(victim)
    cluster.start(victim)
    wait_for("all Jobs to end", lambda: cluster.jobs_done() == QUEUED, 120, explain)
    assert len(uses.nodes()) >= QUEUED


def test_after_a_reboot_pods_come_back_on_their_gpus_where_the_unit_is_before_the_kubelet(cluster: Cluster) -> None:
    before = _two_pods(cluster)
    cluster.kill_all()
    cluster.boot_again()
    for name, minors in before.items():
        cluster.wait_phase(name, restarts=1)
        assert cluster.minors(name) == minors


def test_after_a_reboot_pods_fail_where_the_kubelet_is_first(cluster: Cluster) -> None:
    """As with a DaemonSet, which the kubelet starts: their controllers make new ones."""
    before = _two_pods(cluster)
    cluster.kill_all()
    cluster.start("containerd")
    cluster.start("kubelet")
    for name in before:
        cluster.wait_phase(name, "Failed")
        cluster.wait_said(name, "UnexpectedAdmissionError")
    cluster.start(DAEMON)
    cluster.wait_allocatable(4)
    cluster.kubectl("delete", "pods", "--all")
    cluster.apply(pod("next", 4))
    cluster.wait_phase("next")


def _two_pods(cluster: Cluster) -> dict[str, Any]:
    """With two GPUs each."""
    cluster.run_daemon()
    cluster.wait_allocatable(4)
    cluster.apply(pod("one", 2), pod("two", 2))
    cluster.wait_running("one", "two")
    return {name: cluster.minors(name) for name in ("one", "two")}
