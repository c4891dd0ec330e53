"""From NVIDIA's DRA driver to ours and back, node by node: the pods of the other nodes notice nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.cluster.test_three_nodes import on, restarts, train
from tests.support.cluster import DAEMON, DRA, Cluster
from tests.support.cluster_claims import DraCluster, claiming
from tests.support.daemon import FOUR_GPUS
from tests.support.nvidia_dra import SET, NvidiaDra, asked

pytestmark = [pytest.mark.cluster, pytest.mark.ground(SET)]


@pytest.fixture
def nvidia(three_nodes: Cluster) -> Iterator[Mapping[str, NvidiaDra]]:
    """That driver on each node."""
    made = {node.node: NvidiaDra(node, FOUR_GPUS) for node in three_nodes.each()}
    for each in made.values():
        each.run()
    yield made
    three_nodes.kubectl("delete", "pods,resourceclaims", "--all")  # while what prepared them runs
    for each in made.values():
        each.stop()


def train_by_nvidia(node: Cluster) -> str:
    """A pod on that node with a GPU of NVIDIA's driver, running; its name."""
    name = f"theirs-{node.node}"
    node.apply(*on(node, claiming(name, asked())))
    node.wait_phase(name)
    assert len(node.minors(name)) == 1
    return name


def test_node_by_node(three_nodes: Cluster, nvidia: Mapping[str, NvidiaDra]) -> None:
    nodes = [*three_nodes.each()]
    names = {node.node: train_by_nvidia(node) for node in nodes}
    had = {node.node: node.minors(names[node.node]) for node in nodes}

    def check_others() -> None:
        for node in nodes:
            if (name := names.get(node.node)) is not None:
                assert node.minors(name) == had[node.node]
                assert restarts(node, name) == 0

    for node in nodes[:2]:
        three_nodes.kubectl("delete", "pod", names.pop(node.node))
        nvidia[node.node].leave()
        dra = DraCluster(node)
        dra.run(FOUR_GPUS)
        ours = train(node, 4)  # those of NVIDIA's pods, too
        node.wait_phase(ours)
        assert node.minors(ours) == frozenset(range(4))
        check_others()

    first = nodes[0]
    three_nodes.kubectl("delete", "pod", f"train-{first.node}")
    DraCluster(first).wait_nothing_left()
    first.stop(DRA, DAEMON)
    for name in (DRA, DAEMON):
        first.forget(name)
    three_nodes.kubectl(
        "delete", "resourceslices", f"--field-selector=spec.driver=gpu.nri.io,spec.nodeName={first.node}"
    )
    nvidia[first.node].run()
    names[first.node] = train_by_nvidia(first)
    had[first.node] = first.minors(names[first.node])
    names[nodes[1].node], had[nodes[1].node] = f"train-{nodes[1].node}", frozenset(range(4))
    check_others()
