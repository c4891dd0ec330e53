"""Invariant: whatever stands in an annotation, parsing gives a claim no wider than it says, or a RequestError.

As a test it runs over the corpus beside it; by itself (`python -m tests.fuzz.fuzz_request --seconds 60`) it mutates
that corpus until the time is over and prints the value that broke the invariant.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from ast import literal_eval
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.claim import Count, Devices
from nri_gpu.domain.errors import RequestError
from nri_gpu.request.parse import CLAUSES, VALUE_MAX, WORDS, parse_claim

# One Python string literal a line, so that control characters and other scripts diff as text.
CORPUS: Final = tuple(
    literal_eval(line)
    for line in Path(__file__).with_name("request.corpus").read_text(encoding="ascii").splitlines()
    if line and not line.startswith("#")
)
WELL_FORMED: Final = 7  # so many values at the corpus' start are requests
GRAMMAR: Final = (*WORDS, *CLAUSES, "=", ">=", "<=", "<", ">", ";", ",", " ", "GPU-", "0", "1", "9.0", "40Gi", "shared")


def check(value: str) -> bool:
    """Whether it was understood; anything but a claim or a RequestError comes out as it is."""
    try:
        claim = parse_claim("gpu.nri.io", value)
    except RequestError as error:
        assert error.position is not None
        assert 0 <= error.position <= len(value)
        assert str(error).isascii()
        assert str(error).isprintable()
        assert len(str(error)) < 500
        return False
    assert value.isascii()
    assert len(value) <= VALUE_MAX
    if isinstance(claim.wanted, Count):
        assert str(claim.wanted.gpus) in value or (claim.wanted.gpus == 1 and claim.selectors)
    if isinstance(claim.wanted, Devices):
        assert len(claim.wanted.ids) == len(set(claim.wanted.ids)) <= value.count(",") + 1
    return True


@pytest.mark.parametrize("value", CORPUS, ids=lambda value: ascii(value[:30]))
def test_corpus(value: str) -> None:
    check(value)


def test_a_thousand_mutations() -> None:
    dice = random.Random(2)
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
    dice, end, tried, understood = random.Random(options.seed), time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end:
        value = mutated(dice)
        try:
            understood += check(value)
        except Exception:
            print(f"seed {options.seed}, value {value!a}", file=sys.stderr)
            raise
        tried += 1
    print(f"{tried} values, {understood} understood, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
