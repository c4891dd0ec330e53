"""Invariant: whatever an image's variables say is met or refused in a sentence; what is no condition is never met.

As a test it runs over the corpus beside it; by itself (`python -m tests.fuzz.fuzz_requirements --seconds 60`) it
mutates that corpus until the time is over and prints the value that broke the invariant.
"""

from __future__ import annotations

import random
import re
import sys
from typing import Final

import pytest

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
from tests.fuzz.mutation import Texts, fuzz, read_corpus

CORPUS: Final = read_corpus("requirements.corpus")
WELL_FORMED: Final = 10  # so many values at the corpus' start are requirements
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
TEXTS: Final = Texts(CORPUS, WELL_FORMED, GRAMMAR)


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


def refusal(env: dict[str, str], node: RequirementFacts) -> str:
    """Its sentence, looked at; empty when all is met."""
    found = unmet(env, node)
    if found is None:
        return ""
    for text in (found.variable, found.condition, found.sentence):
        assert text.isascii()
        assert not text or text.isprintable()
    assert found.variable
    assert 0 < len(found.sentence) <= 400
    return found.sentence


def well_formed(value: str) -> bool:
    pieces = set(filter(None, value.replace(" ", ",").split(",")))
    fits = len(value) <= TOTAL_MAX and len(pieces) <= DIFFERENT_MAX
    return fits and all(CONDITION.fullmatch(piece) for piece in pieces)


@pytest.mark.parametrize("value", CORPUS, ids=lambda value: ascii(value[:30]))
def test_corpus(value: str) -> None:
    check(value)


def test_the_corpus_begins_with_requirements() -> None:
    assert all(map(well_formed, CORPUS[:WELL_FORMED]))


def test_a_thousand_mutations() -> None:
    dice = random.Random(3)
    for _ in range(1000):
        check(TEXTS.mutated(dice))


if __name__ == "__main__":
    sys.exit(fuzz(check, TEXTS.mutated, __doc__))
