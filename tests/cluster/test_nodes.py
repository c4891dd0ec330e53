"""Several nodes in one cluster, each with nri-gpu of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.system.storage import text_of
from tests.support.cluster import ROOT, Cluster, pod, wait_for

pytestmark = pytest.mark.cluster

EIGHT = ROOT / "config" / "topologies" / "hgx-h100.toml"
KILLED = """
from tests.support.cluster import Cluster
with Cluster(2) as cluster:
    print(cluster.root, flush=True)
    input()
"""


def test_each_node_has_its_own_daemon(two_nodes: Cluster) -> None:
    """The GPUs, the socket, the log and the pods of one node are not those of the other."""
    first, second = two_nodes.each()
    first.run_daemon()
    second.run_daemon(EIGHT)
    first.wait_allocatable(4)
    second.wait_allocatable(8)
    two_nodes.apply(pod("train", 5))
    assert two_nodes.wait_phase("train")["spec"]["nodeName"] == second.node
    assert len(second.minors("train")) == 5
    held = [sum(bool(gpu["holders"]) for gpu in status(node)["gpus"]) for node in (first, second)]
    assert held == [0, 5]


def status(node: Cluster) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(node.nri_gpu("status", "-o", "json").stdout)
    return found


def test_a_killed_test_leaves_nothing() -> None:
    """No process, cgroup or folder of the cluster is left a few seconds after a test was killed with SIGKILL."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert killed.stdout
    root = Path(os.fsdecode(killed.stdout.readline()).strip())
    assert root.name.startswith("nk-")
    killed.kill()
    killed.communicate()
    wait_for("the end of the cluster", lambda: not root.exists())
    assert not list(Path("/sys/fs/cgroup").glob(f"**/nri-kube-{root.name}"))
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(root) in (text_of(path) or "")]
