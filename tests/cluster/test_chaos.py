"""Daemon, guard and DRA driver of a node dead for half of the time, beneath Jobs: who waits, and who runs without.

The runtime's own validator is on, and each pod that asks by annotation requires nri-gpu.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from nri_gpu.domain.names import GRANT_KEY
from tests.support.chaos import NOT_CONNECTED, REQUIRES, UNSERVED, VALIDATOR, WINDOW
from tests.support.cluster import DAEMON, DRA, GUARD, Cluster, Object, jobs, wait_for
from tests.support.cluster_claims import DraCluster, devices, template
from tests.support.cri import ContainerId, Cri
from tests.support.daemon import FOUR_GPUS
from tests.support.unread import unread_bytes

pytestmark = pytest.mark.cluster

ROUNDS = int(os.environ.get("NRI_GPU_CHAOS", "60")) // 10
EACH = {"plain": 3, "asks": 3, "claims": 1}  # Jobs of a round
SERVED_S = (1.0, 4.0)
ANSWERED_S = 2.0  # the runtime's own limit


@contextmanager
def validating(cluster: Cluster) -> Iterator[None]:
    """The runtime of the node with its own validator."""
    config = cluster.place / "containerd.toml"
    plain = config.read_text()
    try:
        _restart_by(cluster, plain + VALIDATOR)
        yield
    finally:
        _restart_by(cluster, plain)


def _restart_by(cluster: Cluster, config: str) -> None:
    (cluster.place / "containerd.toml").write_text(config)
    cluster.stop("containerd")
    cluster.start("containerd")


def work(cluster: Cluster, number: int) -> list[Object]:
    """Jobs of a round on that node, which fail for good where their container lacks the GPU that it asked for."""
    made = []
    for kind, count in EACH.items():
        names = [f"{kind}-{number}-{each}" for each in range(count)]
        for job in jobs(names, "sleep 1" if kind == "plain" else "ls /dev/nvidia[0-9] && sleep 1"):
            job["spec"]["backoffLimit"] = 0
            pod = job["spec"]["template"]
            pod["metadata"] = {"labels": {"kind": kind}}
            pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cluster.node}
            (container,) = pod["spec"]["containers"]
            container["resources"] = {}
            if kind == "asks":
                pod["metadata"]["annotations"] = {"gpu.nri.io": "device=3; mode=shared", **REQUIRES}
            elif kind == "claims":
                pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "one"}]
                container["resources"] = {"claims": [{"name": "gpus"}]}
            made.append(job)
    return made


class Starved:
    """A node whose three processes are dead for half of the time. deaths: when they died, seconds since the epoch."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._dice = cluster, random.Random(seed)
        self._since = time.monotonic()
        self.deaths: list[float] = []
        self.dead_s = self.served_s = 0.0

    def once(self, work: Sequence[Object]) -> None:
        """Let them serve for a while, kill them, and start them again after as long.

        The work comes when they are dead, or just before: then the daemon dies with a request that it has not read.
        """
        time.sleep(self._dice.uniform(*SERVED_S))
        if before := self._dice.random() < 0.5:
            self._cluster.apply(*work)
            self._await_request(self._cluster.pid(DAEMON))
        served_s, began = time.monotonic() - self._since, time.monotonic()
        self._cluster.kill(*self._dice.sample((DAEMON, GUARD, DRA), 3))
        self.deaths.append(time.time())
        if not before:
            self._cluster.apply(*work)
        time.sleep(max(0, served_s - time.monotonic() + began))
        for name in self._dice.sample((DAEMON, GUARD, DRA), 3):
            self._cluster.start(name)
        self._cluster.wait_ready()
        self._since = time.monotonic()
        self.served_s += served_s
        self.dead_s += self._since - began

    def _await_request(self, pid: int) -> None:
        """Stop the daemon until it was asked and has not read it, for no longer than the runtime waits."""
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + ANSWERED_S
        while not unread_bytes(pid) and time.monotonic() < until:
            time.sleep(0.01)


def created_without(cluster: Cluster, deaths: list[float]) -> Counter[str]:
    """Count containers that asked and have no grant, by whether the daemon can have died while they were created."""
    counts = Counter[str]()
    with Cri(cluster.place / "ctrd.sock") as runtime:
        asking = {pod.id for pod in runtime.pods() if "gpu.nri.io" in pod.annotations}
        for each in runtime.containers():
            if each.pod_sandbox_id not in asking:
                continue
            signed = GRANT_KEY in runtime.status(ContainerId(each.id)).oci.get("annotations", {})
            created = each.created_at / 1e9
            window = any(0 <= created - died <= 2 * ANSWERED_S for died in deaths)
            counts["granted" if signed else WINDOW if window else UNSERVED] += 1
    return counts


def test_with_all_three_dead_half_of_the_time(three_nodes: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain pods are unharmed, whoever asks waits and none runs without, and no Job is lost."""
    cluster = next(three_nodes.each())
    with validating(cluster):
        DraCluster(cluster).run(FOUR_GPUS)
        cluster.run_guard()
        cluster.apply(template("one", devices()))
        starved = Starved(cluster, seed=4)
        for number in range(ROUNDS):
            starved.once(work(cluster, number))
        whole = ROUNDS * sum(EACH.values())
        wait_for("all Jobs", lambda: cluster.jobs_done() == whole, 120, lambda: explained(cluster))
        counts = created_without(cluster, starved.deaths)
        said = Counter[str]()
        for event in cluster.get("events"):
            name, message = event["involvedObject"]["name"], event.get("message", "")
            for text in (NOT_CONNECTED, "validator plugin"):
                said[f"{name.partition('-')[0]}: {text}"] += text in message
    with capsys.disabled():
        print(f"\n{starved.dead_s:.0f} s dead, {starved.served_s:.0f} s served; {+counts}; events: {+said}")
    failed = [pod["metadata"]["name"] for pod in cluster.get("pods") if pod["status"]["phase"] == "Failed"]
    assert failed == []
    assert said[f"plain: {NOT_CONNECTED}"] == 0
    assert said[f"asks: {NOT_CONNECTED}"]
    assert starved.dead_s >= starved.served_s
    assert counts["granted"] == ROUNDS * EACH["asks"]
    assert counts[UNSERVED] == 0


def explained(cluster: Cluster) -> str:
    events = cluster.kubectl("get", "events", "--field-selector=type=Warning")[-4000:]
    return "\n".join([cluster.kubectl("get", "pods"), events, *(cluster.log(each)[-2000:] for each in (DAEMON, DRA))])
