"""The comparison is fair: our version of go-gpuallocator's rule takes what its own code took."""

from __future__ import annotations

import pytest

from bench.placement import BestEffort
from nri_gpu.allocation.topology import topology_of
from tests.support.fabrics import KNOWN
from tests.support.golden_sets import GOLDEN, Golden

RIVALS = {name: BestEffort(topology_of(inventory)) for name, inventory in KNOWN.items()}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_it_takes_what_theirs_took(case: Golden) -> None:
    assert RIVALS[case.topology](case.available, case.size, case.required) == case.chosen


SUCCESSIVE = {
    "dgx1-v100": [(0, 3), (1, 2), (4, 7), (5, 6)],
    "dgx1-p100": [(0, 2), (1, 3), (4, 6), (5, 7)],
    "rtx8000": [(0, 3), (1, 2)],
}


@pytest.mark.parametrize(("topology", "taken"), SUCCESSIVE.items(), ids=SUCCESSIVE)
def test_pairs_one_after_the_other(topology: str, taken: list[tuple[int, ...]]) -> None:
    free = tuple(range(len(KNOWN[topology].gpus)))
    for pair in taken:
        assert RIVALS[topology](free, 2) == pair
        free = tuple(place for place in free if place not in pair)
