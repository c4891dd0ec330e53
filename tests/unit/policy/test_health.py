"""Settings of health: lists of numbers, and what contradicts itself between them."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.health import Sign
from nri_gpu.health.controller import rules_of
from nri_gpu.policy.parse import parse_policy


def test_defaults_are_three_classes() -> None:
    rules = rules_of(parse_policy({}, "f").health)
    assert not rules.ignored_xids & rules.fatal_xids
    assert {79, 48} <= rules.fatal_xids
    assert {13, 31, 43, 45, 68, 109} <= rules.ignored_xids


def test_lists_of_ones_own() -> None:
    health = {"fatal_xids": [79], "fatal_signs": ["fabric-not-ready"], "suspect_signs": []}
    rules = rules_of(parse_policy({"health": health}, "f").health)
    assert rules.fatal_xids == {79}
    assert rules.fatal_signs == {Sign.FABRIC_NOT_READY}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({"fatal_xids": [79, 31]}, "health.fatal_xids: 31: in ignored_xids too"),
        ({"suspect_signs": ["lost"]}, "health.suspect_signs: lost: in fatal_signs too"),
        ({"fatal_xids": [79, 79]}, "health.fatal_xids[1]: 79 is listed twice"),
        ({"fatal_xids": ["79"]}, "health.fatal_xids[0]: must be a whole number, not a string"),
        ({"fatal_xids": [True]}, "health.fatal_xids[0]: must be a whole number, not a boolean"),
        ({"fatal_xids": [0]}, "health.fatal_xids[0]: must be 1 to 65535, not 0"),
        ({"fatal_xids": 79}, "health.fatal_xids: must be an array"),
        ({"ignored_xids": list(range(1, 258)), "fatal_xids": []}, "has 257 items, over the limit of 256"),
    ],
)
def test_faults(health: dict[str, object], expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy({"health": health}, "f")
    (fault,) = caught.value.faults
    assert expected in str(fault)
