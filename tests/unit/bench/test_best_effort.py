"""The comparison is fair: our version of go-gpuallocator's rule takes what its own code took."""

from __future__ import annotations

import pytest

from bench.placement import BestEffort
from nri_gpu.decision.topology import topology_of
from tests.support.fabrics import KNOWN
from tests.support.golden_sets import GOLDEN, Golden

RIVALS = {name: BestEffort(topology_of(inventory)) for name, inventory in KNOWN.items()}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_it_takes_what_theirs_took(case: Golden) -> None:
    assert RIVALS[case.topology](case.available, case.size, case.required) == case.chosen
