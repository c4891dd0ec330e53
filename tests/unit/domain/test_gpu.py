from __future__ import annotations

import pytest

from nri_gpu.domain.gpu import Capability, closed_sets, closure

C = Capability
CLOSURES = {
    "video runs on compute": ({C.VIDEO}, {C.VIDEO, C.COMPUTE}),
    "display shows graphics": ({C.DISPLAY, C.UTILITY}, {C.DISPLAY, C.GRAPHICS, C.UTILITY}),
    "compat32 brings nothing": ({C.COMPAT32}, {C.COMPAT32}),
}


@pytest.mark.parametrize(("asked", "closed"), CLOSURES.values(), ids=CLOSURES)
def test_what_a_capability_brings_along(asked: set[Capability], closed: set[Capability]) -> None:
    assert closure(frozenset(asked)) == closed
    assert closure(frozenset(closed)) == closed


def test_the_closed_sets_are_few_and_smallest_first() -> None:
    sets = list(closed_sets())
    assert len(sets) == len(set(sets)) == 3 * 3 * 2 * 2 * 2 - 1
    assert [len(each) for each in sets] == sorted(len(each) for each in sets)
