from __future__ import annotations

import pytest

from nri_gpu.allocation.topology import links_among, points, topology_of
from nri_gpu.domain.node import Link
from tests.support import builders as make
from tests.support.fabrics import KNOWN


@pytest.mark.parametrize(
    ("link", "worth"),
    [
        (Link(0, 1, "PIX"), 50),
        (Link(0, 1, "PXB"), 40),
        (Link(0, 1, "PHB"), 30),
        (Link(0, 1, "NODE"), 20),
        (Link(0, 1, "SYS"), 10),
        (Link(0, 1, "SYS", 18), 1810),
        (Link(0, 1, "", 2), 200),
    ],
    ids=str,
)
def test_points_of_a_pair(link: Link, worth: int) -> None:
    assert points(link) == worth


def test_pairs_are_the_same_both_ways_and_none_is_nothing() -> None:
    inventory = make.inventory(make.gpus(3), links=(Link(0, 2, "PIX", 1),))
    assert topology_of(inventory).points == ((0, 0, 150), (0, 0, 0), (150, 0, 0))


def test_places_are_not_indices() -> None:
    """A lost GPU leaves a hole in the indices."""
    inventory = make.inventory([make.gpu(0), make.gpu(2), make.gpu(5)], links=(Link(2, 5, "PIX"), Link(0, 1, "PIX")))
    fabric = topology_of(inventory)
    assert fabric.places == {make.uuid(0): 0, make.uuid(2): 1, make.uuid(5): 2}
    assert fabric.points == ((0, 0, 0), (0, 0, 50), (0, 50, 0))


def test_near_is_one_numa_node_that_is_known() -> None:
    gpus = [make.gpu(0, numa_node=0), make.gpu(1, numa_node=1), make.gpu(2, numa_node=0), make.gpu(3)]
    assert topology_of(make.inventory([*gpus, make.gpu(4)])).near == (
        (0, 0, 1, 0, 0),
        (0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
    )


def test_links_in_a_word_the_best_first() -> None:
    inventory = KNOWN["dgx1-v100"]
    assert list(links_among(inventory.gpus[:4], inventory).items()) == [("NV2", 3), ("NV1", 3)]
    assert links_among((inventory.gpus[0], inventory.gpus[7], inventory.gpus[1]), inventory) == {"NV1": 1, "SYS": 2}
    assert links_among(inventory.gpus[:1], inventory) == {}
    assert links_among(make.gpus(2), make.inventory()) == {"?": 1}
