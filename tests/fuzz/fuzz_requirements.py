"""Invariant: whatever an image's variables say is met or refused in a sentence; what is no condition is never met.

As a test it runs over the corpus beside it; by itself (`python -m tests.fuzz.fuzz_requirements --seconds 60`) it
mutates that corpus until the time is over and prints the value that broke the invariant.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from ast import literal_eval
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.requirements.check import CUDA_VERSION, DISABLE, PREFIX, REQUIRE_CUDA, TOTAL_MAX, unmet
from nri_gpu.requirements.facts import BRANDS, Facts, GpuFacts

# One Python string literal a line, so that control characters and other scripts diff as text.
CORPUS: Final = tuple(
    literal_eval(line)
    for line in Path(__file__).with_name("requirements.corpus").read_text(encoding="ascii").splitlines()
    if line and not line.startswith("#")
)
WELL_FORMED: Final = 10  # so many values at the corpus' start are requirements
GRAMMAR: Final = (
    *("cuda", "driver", "arch", "brand", "=", "!=", "<", "<=", ">", ">=", ",", " ", "12", "12.4", "470", "9.0", "."),
    *BRANDS,
)
NODES: Final = (
    Facts("560.35.03", "12.6", (GpuFacts((9, 0), "nvidia"), GpuFacts((7, 0), "tesla"))),
    Facts("470.57.02", "11.4", ()),
    Facts("", "", (GpuFacts((0, 0), ""),)),
)
CONDITION: Final = re.compile(
    r"(?:(?:cuda|driver|arch)(?:=|!=|<=?|>=?)\d[\d.]*|brand!?=[\w.-]+)", re.ASCII | re.IGNORECASE
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


def refusal(env: dict[str, str], node: Facts) -> str:
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
    pieces = filter(None, value.replace(" ", ",").split(","))
    return len(value) <= TOTAL_MAX and all(CONDITION.fullmatch(piece) for piece in pieces)


@pytest.mark.parametrize("value", CORPUS, ids=lambda value: ascii(value[:30]))
def test_corpus(value: str) -> None:
    check(value)


def test_the_corpus_begins_with_requirements() -> None:
    assert all(map(well_formed, CORPUS[:WELL_FORMED]))


def test_a_thousand_mutations() -> None:
    dice = random.Random(3)
    for _ in range(1000):
        check(mutated(dice))


def mutated(dice: random.Random) -> str:
    """A value of the corpus with a few short pieces cut, doubled, changed or put in."""
    value: str = dice.choice(CORPUS if dice.random() < 0.5 else CORPUS[:WELL_FORMED])
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(0, len(value))
        end = min(len(value), at + dice.choice((0, 0, 1, 1, 2, 5)))
        near, far = dice.choice(GRAMMAR), chr(dice.choice((dice.randint(0, 127), dice.randint(0, 0xD7FF))))
        new = dice.choice((near, near, near, value[at:end], far))
        value = value[:at] + new + value[dice.choice((at, end)) :]
    return value * dice.choice((1, 1, 1, 1, 50))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args()
    dice, end, tried, met = random.Random(options.seed), time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end:
        value = mutated(dice)
        try:
            met += check(value)
        except Exception:
            print(f"seed {options.seed}, value {value!a}", file=sys.stderr)
            raise
        tried += 1
    print(f"{tried} values, {met} met, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
