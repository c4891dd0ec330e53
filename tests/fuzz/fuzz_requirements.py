"""Invariant: whatever an image's variables say is met or refused in a sentence; what is no condition is never met.

As a test it tries a thousand mutations of the check's own cases; by itself (`python -m tests.fuzz.fuzz_requirements
--seconds 60`) it mutates them until the time is over and prints the value that broke the invariant.
"""

from __future__ import annotations

import random
import re
import sys
from typing import Final

from nri_gpu.requirements.check import (
    BRANDS,
    CUDA_VERSION,
    DIFFERENT_MAX,
    DISABLE,
    PREFIX,
    REQUIRE_CUDA,
    TOTAL_MAX,
    GpuFacts,
    RequirementFacts,
    unmet,
)
from tests.fuzz.mutation import Texts, fuzz
from tests.unit.requirements.test_check import MALFORMED, NOT_TRUE, REAL, TRUE

GRAMMAR: Final = (
    *("cuda", "driver", "arch", "brand", "=", "!=", "<", "<=", ">", ">=", ",", " ", "12", "12.4", "470", "9.0", "."),
    *BRANDS,
)
NODES: Final = (
    RequirementFacts("560.35.03", "12.6", (GpuFacts((9, 0), "nvidia"), GpuFacts((7, 0), "tesla"))),
    RequirementFacts("470.57.02", "11.4", ()),
    RequirementFacts("", "", (GpuFacts((0, 0), ""),)),
)
CONDITION: Final = re.compile(
    r"(?:(?:cuda|driver|arch)(?:=|!=|<=?|>=?)\d[\d.]*|brand!?=[\w.-]+)", re.ASCII | re.IGNORECASE
)
VERSIONS: Final = ("abc", "12.4.1", "12.4.1rc1", "v12.4", "-1.0", "cu121", "12.04", "12.4.1.2")
TEXTS: Final = Texts(
    good=(*dict.fromkeys(value for value, _, _ in REAL.values()), "CUDA>=12,Driver!=560.35.03", "arch>7.5 cuda<13", ""),
    bad=(*MALFORMED.values(), *VERSIONS, *TRUE, *NOT_TRUE),
    grammar=GRAMMAR,
)


def check(value: str) -> bool:
    """Whether the first node meets it, as NVIDIA_REQUIRE_CUDA; any exception comes out as it is."""
    for node in NODES:
        for env in ({REQUIRE_CUDA: value}, {CUDA_VERSION: value}, {f"{PREFIX}{value}": "cuda>=99"}):
            said = refusal(env, node)
            assert said or set(env) != {REQUIRE_CUDA} or well_formed(value)
            assert bool(refusal(env | {DISABLE: value}, node)) is bool(said), "only policy lets it be turned off"
        assert refusal({REQUIRE_CUDA: "cuda>=99", DISABLE: value}, node)
        assert refusal({REQUIRE_CUDA: f"{value} bogus>=1"}, node)
        assert refusal({REQUIRE_CUDA: f"cuda>=99,{value}".replace(" ", ",")}, node)
    return not refusal({REQUIRE_CUDA: value}, NODES[0])


def refusal(env: dict[str, str], node: RequirementFacts, *, may_disable: bool = False) -> str:
    """Its sentence, looked at; empty when all is met."""
    found = unmet(env, node, may_disable=may_disable)
    if found is None:
        return ""
    for text in (found.variable, found.condition, found.sentence):
        assert text.isascii()
        assert not text or text.isprintable()
    assert found.variable
    assert 0 < len(found.sentence) <= 400
    assert max(len(found.variable), len(found.condition)) <= 48 + len("...")
    assert found.sentence.endswith(".")
    return found.sentence


def well_formed(value: str) -> bool:
    pieces = set(filter(None, value.replace(" ", ",").split(",")))
    fits = len(value) <= TOTAL_MAX and len(pieces) <= DIFFERENT_MAX
    return fits and all(CONDITION.fullmatch(piece) for piece in pieces)


def test_the_good_ones_are_requirements() -> None:
    assert all(map(well_formed, TEXTS.good))


def test_a_thousand_mutations() -> None:
    dice = random.Random(3)
    for _ in range(1000):
        check(TEXTS.mutated(dice))


if __name__ == "__main__":
    sys.exit(fuzz(check, TEXTS.mutated, __doc__))
