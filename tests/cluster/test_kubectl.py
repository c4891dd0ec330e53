"""`kubectl nri-gpu` by the real kubectl, on two nodes with the chart's pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.support.cluster import NAMESPACE, ROOT, Cluster, pod

pytestmark = pytest.mark.cluster

PLUGIN = ROOT / "share" / "kubectl"
READER = {
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}],
    "kind": "Role",
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "metadata": {"name": "reader", "namespace": NAMESPACE},
}


@pytest.fixture(scope="module")
def imported(two_nodes_running: Cluster) -> None:
    two_nodes_running.import_image()


@pytest.fixture
def cluster(two_nodes: Cluster, imported: None) -> Cluster:
    """With the chart's pods on both nodes."""
    two_nodes.install()
    for node in two_nodes.each():
        node.wait_allocatable(4)
    return two_nodes


def kubectl(cluster: Cluster, *words: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real kubectl, with the plugin in its PATH."""
    path = os.pathsep.join((str(PLUGIN), cluster.environment["KUBE_BIN"], cluster.environment["PATH"]))
    return cluster.enter("env", f"PATH={path}", f"KUBECONFIG={config or cluster.admin}", "kubectl", *words)


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [line.split() for line in done.stdout.splitlines()]


def test_two_nodes(cluster: Cluster) -> None:
    """One table of both; then the daemon of one hangs; then that node is gone."""
    _first, second = cluster.each()
    cluster.apply(pod("train", 3), pod("notebook", 1))
    held = {name: cluster.wait_phase(name)["spec"]["nodeName"] for name in ("train", "notebook")}
    for spelling in ("nri-gpu", "nri_gpu"):
        done = kubectl(cluster, spelling, "status")
        assert (done.returncode, done.stderr) == (Exit.OK, "")
        heads, *found = rows(done)
        assert heads[0] == "NODE"
        assert [row[0] for row in found] == ["node1"] * 5 + ["node2"] * 5
        assert [row[1] for row in found] == ["SIMULATED:", "0", "1", "2", "3"] * 2
        holders = {(row[0], row[4].removeprefix("default/")) for row in found if row[4].startswith("default/")}
        assert holders == {(node, name) for name, node in held.items()}
    mine = rows(kubectl(cluster, "nri-gpu", "status", "-n", "default", "--node", held["train"]))[1:]
    assert {row[0] for row in mine} == {held["train"]}
    for verb in ("verify", "doctor"):
        done = kubectl(cluster, "nri-gpu", verb)
        assert (done.stderr, {row[0] for row in rows(done)[1:]}) == ("", {"node1", "node2"}), done.stdout
    with stopped(second):
        done = kubectl(cluster, "nri-gpu", "status")
        assert done.returncode == Exit.UNAVAILABLE
        (row,) = (line for line in done.stdout.splitlines() if line.startswith("node2"))
        assert "no answer from the daemon" in row or "no answer within 10 s" in row
    second.stop("kubelet")
    try:
        done = kubectl(cluster, "nri-gpu", "status")
        assert done.returncode == Exit.UNAVAILABLE
        assert [row[0] for row in rows(done)] == ["NODE", *["node1"] * 5, "node2"]
        assert "connection refused" in done.stdout
    finally:
        second.start("kubelet")


@contextmanager
def stopped(node: Cluster) -> Iterator[None]:
    """The daemon of the chart's pod on a node hangs."""
    found = node.get("pods", "", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=daemon")
    (name,) = (each["metadata"]["name"] for each in found if each["spec"]["nodeName"] == node.node)
    status = node.get("pod", name, "-n", NAMESPACE)["status"]["containerStatuses"]
    (container,) = (each["containerID"].removeprefix("containerd://") for each in status)
    tasks = [line.split() for line in node.verb("ctr", "task", "ls").splitlines()]
    (pid,) = (int(pid) for found, pid, *_ in tasks if found == container)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_user_without_rights(cluster: Cluster) -> None:
    """Who may not list pods gets one sentence, who may not run commands in them one for each node."""
    cluster.kubectl("create", "serviceaccount", "eve", "-n", NAMESPACE)
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"] = {"token": cluster.kubectl("create", "token", "eve", "-n", NAMESPACE).strip()}
    eve = cluster.file("eve.conf", json.dumps(config))
    done = kubectl(cluster, "nri-gpu", "status", config=eve)
    assert (done.returncode, done.stdout) == (Exit.UNAVAILABLE, "")
    assert "cannot list resource" in done.stderr
    assert "you need `list pods` and `create pods/exec` there" in done.stderr
    cluster.apply(READER)
    cluster.kubectl(
        "create", "rolebinding", "eve", "-n", NAMESPACE, "--role=reader", f"--serviceaccount={NAMESPACE}:eve"
    )
    done = kubectl(cluster, "nri-gpu", "status", config=eve)
    assert (done.returncode, [row[0] for row in rows(done)]) == (Exit.UNAVAILABLE, ["NODE", "node1", "node2"])
    assert done.stdout.count("you need `create pods/exec` there, which is root on each node") == 2


def test_completion(cluster: Cluster) -> None:
    """As the shells ask kubectl for it."""
    assert "nri-gpu" in kubectl(cluster, "plugin", "list").stdout.replace("_", "-")
    for words, found in (
        (("nri-gpu", "st"), ["status", ":4"]),
        (("nri-gpu", "status", "--node", ""), ["node1", "node2", ":4"]),
        (("nri-gpu", "verify", "--namespace", "nri"), [NAMESPACE, ":4"]),
    ):
        assert kubectl(cluster, "__complete", *words).stdout.splitlines() == found
