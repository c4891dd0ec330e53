"""Which GPUs out of a pool: against go-gpuallocator's own answers, against brute force, and what it may cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

from nri_gpu.decision.topology import (
    EXACT_MAX,
    Surroundings,
    Topology,
    best_set,
    choose,
    links_among,
    points,
    topology_of,
)
from nri_gpu.domain.gpu_request import Strategy
from nri_gpu.domain.node import Link
from tests.support import builders as make
from tests.support.fabrics import KNOWN
from tests.support.golden_sets import GOLDEN, GOLDEN_16, Golden

FABRICS = {name: topology_of(inventory) for name, inventory in KNOWN.items()}
REACHED = [case for case in (*GOLDEN, *GOLDEN_16) if case.chosen]


def whole(fabric: Topology, pool: tuple[int, ...], number: int, strategy: Strategy = Strategy.PACK) -> tuple[int, ...]:
    """As for a pod alone, where nobody holds the pool and others hold the rest."""
    return choose(fabric, number, pool, (), Surroundings((), pool, strategy))


@pytest.mark.parametrize("case", REACHED, ids=str)
def test_no_worse_than_go_gpuallocator(case: Golden) -> None:
    fabric = FABRICS[case.topology]
    pool = tuple(sorted(set(case.available) - case.required))
    taken = tuple(sorted(case.required))
    chosen = (*taken, *choose(fabric, case.size - len(taken), pool, taken, Surroundings((), pool)))
    assert len(set(chosen)) == case.size
    assert set(chosen) <= set(case.available)
    assert fabric.score(case.chosen) == case.points
    assert fabric.score(chosen) >= case.points


def test_numa_breaks_ties_where_no_path_is_known() -> None:
    dark = Topology({}, ((0,) * 4,) * 4, ((0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)))
    assert choose(dark, 2, (0, 1, 2, 3)) == (0, 2)
    assert choose(dark, 1, (0, 1, 3), (2,)) == (0,)
    assert choose(dark, 2, (0, 1, 3)) == (1, 3)


class Counted(tuple[int, ...]):
    """A row that counts how often it is read whole: once for each beginning of a set."""

    reads = 0

    def __iter__(self) -> Iterable[int]:  # type: ignore[override]  # an iterator, in more general words
        Counted.reads += 1
        return super().__iter__()


def rows_of(fabric: Topology, pool: Sequence[int]) -> list[Counted]:
    return [Counted(fabric.points[a][b] for b in pool) for a in pool]


@pytest.mark.parametrize("size", range(1, 17))
def test_what_it_may_cost(size: int) -> None:
    """By sets looked at, not by the clock: a few hundred microseconds on any machine."""
    for number in range(1, size + 1):
        rows = rows_of(FABRICS["dgx2"], range(size))
        Counted.reads = 0
        best_set([1 << place for place in range(size)], rows, number)
        assert Counted.reads <= min(2 * EXACT_MAX, 4 * size * size)


def brute(fabric: Topology, pool: Sequence[int], number: int) -> int:
    return max(fabric.score(some) for some in combinations(pool, number))


@pytest.mark.parametrize("number", [4, 6, 8, 12])
@pytest.mark.parametrize("gone", [(), (0,), (0, 1, 2), (0, 5, 10), (3, 4, 11, 12)], ids=str)
def test_sixteen_are_as_good_as_by_looking_at_all(number: int, gone: tuple[int, ...]) -> None:
    """Beyond EXACT_MAX the search grows sets; on a machine that is a tree of switches it still finds the best."""
    fabric, pool = FABRICS["dgx2"], tuple(place for place in range(16) if place not in gone)
    assert fabric.score(whole(fabric, pool, number)) == brute(fabric, pool, number)


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
