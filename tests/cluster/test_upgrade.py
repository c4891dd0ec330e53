"""What the kubelet gave while nobody of ours was there, and an upgrade beneath queued Jobs."""

import json
import os
import signal
import time
from collections.abc import Mapping

import pytest

from tests.support.cluster import (
    BUSYBOX,
    DAEMON,
    DRA,
    GUARD,
    NAMESPACE,
    NEXT,
    STATE,
    Cluster,
    Object,
    jobs,
    pod,
    wait_for,
)
from tests.support.cluster_claims import POOLS, DraCluster, claiming
from tests.support.daemon import FOUR_GPUS
from tests.support.released import released

pytestmark = pytest.mark.cluster

GPUS = 4
QUEUED = 24
SENTENCE = "nri-gpu-is-not-running-on-this-node"


def allocated_early(name: str) -> Object:
    """A pod that is admitted, and so allocated for, ten seconds before its container is created."""
    made = pod(name, 1)
    made["spec"]["initContainers"] = [{"name": "early", "image": BUSYBOX, "command": ["sh", "-c", "sleep 10"]}]
    return made


@pytest.mark.parametrize("restarts", ["Always", "Never"])
def test_nothing_that_the_kubelet_gave_starts_while_daemon_and_guard_are_away(cluster: Cluster, restarts: str) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(GPUS)
    train = allocated_early("train")
    train["spec"]["restartPolicy"] = restarts
    cluster.apply(train)
    cluster.wait_said("train", "Container started")
    cluster.kill(DAEMON, GUARD)
    cluster.wait_said("train", SENTENCE)
    cluster.start(DAEMON)
    if restarts == "Never":
        cluster.wait_phase("train", "Failed")  # a start that failed was a start
    else:
        cluster.wait_phase("train")
        assert len(cluster.minors("train")) == 1


def assert_few_lost(cluster: Cluster, most: int = GPUS) -> None:
    """No more pods failed than have GPUs at once, each in one of the two gaps that docs/upgrade.md lists.

    Jobs of one length end together, and the next ones begin together. Without a successor, 21 of 24 pods failed.
    """
    failed = [pod["metadata"]["name"] for pod in cluster.get("pods") if pod["status"]["phase"] == "Failed"]
    said = {name: cluster.said_of(name) for name in failed}
    assert all("UnexpectedAdmissionError" in each or SENTENCE in each for each in said.values()), said
    assert len(said) <= most, said


def wait_jobs(cluster: Cluster, count: int, timeout_s: float = 90) -> None:
    wait_for(f"{count} Jobs to end", lambda: cluster.jobs_done() >= count, timeout_s, lambda: explained(cluster))


def explained(cluster: Cluster) -> str:
    daemons = ("-n", NAMESPACE, "-l", "app.kubernetes.io/component=daemon")
    logs = cluster.log(DAEMON)[-3000:] or cluster.kubectl("logs", *daemons, "--tail=40", check=False)
    return f"{cluster.allocatable()} allocatable\n{cluster.kubectl('get', 'pods')}\n{logs}"


def test_a_successor_beneath_queued_jobs_costs_no_job(cluster: Cluster) -> None:
    """As under systemd: the next daemon stands by, the last one is stopped, and the same back again: six times."""
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(GPUS)
    cluster.apply(*jobs([f"job-{number}" for number in range(QUEUED)], "sleep 2"))
    wait_jobs(cluster, 2)
    for _ in range(3):
        for last, following in ((DAEMON, NEXT), (NEXT, DAEMON)):
            cluster.run_successor(following)
            cluster.stop(last)
            time.sleep(1)
    wait_jobs(cluster, QUEUED)
    assert_few_lost(cluster)


def wait_settled(cluster: Cluster) -> None:
    """A rollout that begins before the pods are available waits for ever: its controller forgets to look again."""

    def available() -> bool:
        return bool(cluster.get("daemonset", "nri-gpu", "-n", NAMESPACE)["status"].get("numberAvailable"))

    wait_for("an available daemon", available)
    time.sleep(2)


def test_a_rollout_of_the_chart_beneath_queued_jobs_costs_no_job(cluster: Cluster, image: None) -> None:
    cluster.install()
    cluster.wait_allocatable(GPUS)
    wait_settled(cluster)
    cluster.apply(*jobs([f"job-{number}" for number in range(QUEUED)], "sleep 2"))
    wait_jobs(cluster, 2)
    cluster.kubectl("rollout", "restart", "daemonset/nri-gpu", "-n", NAMESPACE)
    cluster.kubectl("rollout", "status", "daemonset/nri-gpu", "-n", NAMESPACE, "--timeout=120s")
    wait_jobs(cluster, QUEUED)
    assert_few_lost(cluster)


def test_to_this_version_and_back(cluster: Cluster, dra: DraCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a GPU, by whichever way, keeps it and nobody else gets it; also a container that starts again."""
    today = {"PYTHONPATH": cluster.environment["PYTHONPATH"]}

    def change(version: Mapping[str, str]) -> None:
        monkeypatch.setitem(cluster.environment, "PYTHONPATH", version["PYTHONPATH"])
        for name in (DRA, DAEMON, GUARD):
            cluster.stop(name)
        for name in (GUARD, DAEMON, DRA):
            cluster.start(name)
        cluster.wait_ready()

    monkeypatch.setitem(cluster.environment, "PYTHONPATH", released()["PYTHONPATH"])
    dra.run(FOUR_GPUS, POOLS, "--kubelet")
    cluster.spawn(GUARD, "guard", "--policy", str(cluster.folder / "policy.toml"))
    cluster.wait_allocatable(2)
    cluster.apply(pod("annotated", annotations={"gpu.nri.io": "1"}), pod("counted", 1), *claiming("claiming"))
    names = ("annotated", "counted", "claiming")
    cluster.wait_running(*names)
    kept = {name: cluster.minors(name) for name in names}
    assert len(frozenset().union(*kept.values())) == 3
    for starts, version in enumerate((today, released(), today), 1):
        change(version)
        assert {name: cluster.minors(name) for name in names} == kept
        for name in names:
            (pid,) = cluster.pids(name)
            os.kill(pid, signal.SIGKILL)
        for name in names:
            cluster.wait_phase(name, restarts=starts)
        assert {name: cluster.minors(name) for name in names} == kept
        cluster.apply(pod("other", annotations={"gpu.nri.io": "1"}), pod("next", 1))
        cluster.wait_said("other", "held by default/annotated, default/claiming")
        cluster.wait_running("next")
        assert cluster.minors("next") == {0, 1} - kept["counted"]
        dra.delete("pod", "other", "next")
    replayed = json.loads(cluster.nri_gpu("replay", f"{STATE}/audit.jsonl", "-o", "json").stdout)
    assert replayed["decisions"] >= 3 + 3 * 5  # of both versions; more where a container was tried again
    assert (replayed["unreadable_lines"], replayed["different"]) == (0, [])
    dra.delete("pod", *names)
    dra.wait_nothing_left()
    cluster.apply(pod("counted", 2), pod("annotated", annotations={"gpu.nri.io": "2"}))
    cluster.wait_running("counted", "annotated")
