"""Invariant: whatever stands in an annotation, parsing gives a claim no wider than it says, or a RequestError.

As a test it runs over the corpus beside it; by itself (`python -m tests.fuzz.fuzz_request --seconds 60`) it mutates
that corpus until the time is over and prints the value that broke the invariant.
"""

from __future__ import annotations

import random
import sys
from typing import Final

import pytest

from nri_gpu.domain.claim import Count, Devices
from nri_gpu.domain.errors import RequestError
from nri_gpu.request.parse import CLAUSES, VALUE_MAX, WORDS, parse_claim
from tests.fuzz.mutation import Texts, fuzz, read_corpus

CORPUS: Final = read_corpus("request.corpus")
WELL_FORMED: Final = 7  # so many values at the corpus' start are requests
GRAMMAR: Final = (
    *WORDS,
    *CLAUSES,
    "=",
    ">=",
    "<=",
    "<",
    ">",
    ";",
    ",",
    " ",
    "GPU-",
    "0",
    "1",
    "9.0",
    "40Gi",
    "shared",
    "drm",
    "imex:",
    "rdma",
)
TEXTS: Final = Texts(CORPUS, WELL_FORMED, GRAMMAR)


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
        check(TEXTS.mutated(dice))


if __name__ == "__main__":
    sys.exit(fuzz(check, TEXTS.mutated, __doc__))
