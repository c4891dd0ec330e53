"""Several nodes with different GPUs in one cluster: a node that dies, two versions of ours, the same UUIDs twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import pytest

from tests.support.cluster import DAEMON, DRA, GUARD, Cluster, Object, wait_for
from tests.support.cluster_claims import DraCluster, claiming, devices
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.released import BEFORE_CORDONS, released

pytestmark = pytest.mark.cluster

KINDS: Final = (FOUR_GPUS, TOPOLOGIES / "hgx-h100.toml", TOPOLOGIES / "dgx1-v100.toml")
# Three GPUs at places of those of FOUR_GPUS, and none of them the same.
EXCHANGED: Final = FOUR_GPUS.read_text().replace("a100004-", "b200004-").partition("[[gpu]]\nindex = 3\n")[0]
REGISTERED: Final = "registered with the kubelet"
LACKS: Final = "this node has no such device, it has gpu-0, gpu-1, gpu-2"


def on(node: Cluster, objects: Sequence[Object]) -> list[Object]:
    """The same, with their pods on that node."""
    for each in objects:
        if each["kind"] == "Pod":
            each["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.node}
    return [*objects]


def train(node: Cluster, count: int = 1, name: str = "train") -> str:
    """A pod on that node whose claim is for so many GPUs; its name."""
    whole = f"{name}-{node.node}"
    node.apply(*on(node, claiming(whole, devices(count=count))))
    return whole


def restarts(node: Cluster, name: str) -> int:
    (status,) = node.get("pod", name)["status"]["containerStatuses"]
    count: int = status["restartCount"]
    return count


def holders(node: Cluster) -> dict[str, list[str]]:
    """UUID of each GPU that is held on that node -> its pods."""
    found = json.loads(node.nri_gpu("status", "-o", "json").stdout)["gpus"]
    return {gpu["uuid"]: [each["pod"] for each in gpu["holders"]] for gpu in found if gpu["holders"]}


def test_a_node_dies_with_claims_alive_and_comes_back(three_nodes: Cluster) -> None:
    """The other nodes go on, and its pods run again on the GPUs that they had, which nobody else got."""
    nodes = [*three_nodes.each()]
    for node, topology in zip(nodes, KINDS, strict=True):
        DraCluster(node).run(topology)
    names = [train(node, 2) for node in nodes]
    three_nodes.wait_running(*names)
    had = [node.minors(name) for node, name in zip(nodes, names, strict=True)]
    first, second, _ = nodes
    second.kill_all()
    more = train(first, 2, "more")
    first.wait_phase(more)
    second.boot_again()
    second.wait_phase(names[1], restarts=1)
    assert [node.minors(name) for node, name in zip(nodes, names, strict=True)] == had
    assert [restarts(node, name) for node, name in zip(nodes, names, strict=True)] == [0, 1, 0]
    rest = train(second, 6, "rest")
    second.wait_phase(rest)
    assert second.minors(rest) == frozenset(range(8)) - had[1]


@pytest.mark.short
def test_a_node_comes_back_with_other_gpus(three_nodes: Cluster) -> None:
    """Three in the place of four: a claim is for places, so its pod runs on what is there now, or waits and says so."""
    first, second, _ = three_nodes.each()
    DraCluster(first).run(FOUR_GPUS)
    dra = DraCluster(second)
    dra.run(FOUR_GPUS.read_text())
    stays, names = train(first, 2), [train(second, 2, name) for name in ("train", "more")]
    three_nodes.wait_running(stays, *names)
    places = {name: second.minors(name) for name in names}
    (lost,) = (name for name in names if 3 in places[name])
    (back,) = (name for name in names if name != lost)
    had = {*holders(second)}
    second.kill_all()
    second.file("topology.toml", EXCHANGED)
    second.boot_again()
    second.wait_phase(back, restarts=1)
    assert second.minors(back) == places[back]
    second.wait_said(lost, LACKS)
    held = holders(second)
    assert held.keys().isdisjoint(had)
    assert [*held.values()] == [[back]] * 2
    dra.wait_devices(
        "those that are there", lambda found: {each["name"] for each in found} == {"gpu-0", "gpu-1", "gpu-2"}
    )
    assert restarts(first, stays) == 0
    three_nodes.kubectl("delete", "pod", lost)
    following = train(second, 1, "next")
    second.wait_phase(following)
    assert second.minors(following).isdisjoint(places[back])


def test_two_nodes_with_the_same_uuids_both_serve(three_nodes: Cluster) -> None:
    """Nothing is merged: each node offers, grants and reports its own GPUs, and says nothing of the other's."""
    first, second, _ = three_nodes.each()
    for node in (first, second):
        DraCluster(node).run(FOUR_GPUS)
    assert len(three_nodes.get("resourceslices")) == 2
    names = [train(node, 4) for node in (first, second)]
    three_nodes.wait_running(*names)
    held = [holders(node) for node in (first, second)]
    assert [{*found} for found in held] == [{*held[0]}] * 2
    assert [{pod for pods in found.values() for pod in pods} for found in held] == [{name} for name in names]
    three_nodes.kubectl("delete", "pod", names[0])
    wait_for("the GPUs of one node", lambda: not holders(first))
    assert len(holders(second)) == 4


@pytest.mark.parametrize("older_first", [True, False], ids=["older first", "newer first"])
def test_two_versions_in_one_cluster(three_nodes: Cluster, older_first: bool) -> None:
    """One node by the version before, one by today's; then each by the other's: all keep what they had."""
    first, second, _ = nodes = [*three_nodes.each()]
    today, before = first.environment["PYTHONPATH"], released(BEFORE_CORDONS)["PYTHONPATH"]
    versions = (before, today) if older_first else (today, before)
    for node, version, topology in zip(nodes[:2], versions, KINDS[:2], strict=True):
        node.environment["PYTHONPATH"] = version
        DraCluster(node).run(topology)
        node.spawn(GUARD, "guard", "--policy", str(node.folder / "policy.toml"))
    names = [train(node, 2) for node in (first, second)]
    three_nodes.wait_running(*names)
    had = [holders(node) for node in (first, second)]
    for node, version in zip((first, second), reversed(versions), strict=True):
        node.environment["PYTHONPATH"] = version
        for name in (DRA, DAEMON, GUARD):
            node.stop(name)
        registered = node.log(DRA).count(REGISTERED)
        for name in (GUARD, DAEMON, DRA):
            node.start(name)
        node.wait_ready()
        # A kubelet that knows no driver of a claim asks again after a minute or more.
        wait_for("the driver", lambda: node.log(DRA).count(REGISTERED) > registered)  # noqa: B023 - at once
        following = train(node, 2, "next")
        node.wait_phase(following)
    for node, name, kept in zip((first, second), names, had, strict=True):
        now = holders(node)
        assert kept.items() <= now.items()
        assert len(now) == 4
        assert restarts(node, name) == 0
