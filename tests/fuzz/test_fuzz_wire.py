from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz import fuzz_wire


@pytest.mark.parametrize("path", fuzz_wire.corpus(), ids=lambda path: path.stem)
def test_the_invariant_holds_for_the_corpus(path: Path) -> None:
    fuzz_wire.check(fuzz_wire.read(path))


def test_the_invariant_holds_for_some_mutations_of_it() -> None:
    rng, pool = random.Random(0), [fuzz_wire.read(path) for path in fuzz_wire.corpus()]
    for _ in range(300):
        fuzz_wire.check(fuzz_wire.mutate(rng.choice(pool), pool, rng))


def test_there_is_a_corpus() -> None:
    assert len(fuzz_wire.corpus()) >= 8
