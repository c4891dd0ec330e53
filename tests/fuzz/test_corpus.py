"""Every kept input of every target, without instrumentation: what was once a bug stays mended, within its time."""

from __future__ import annotations

import time

import pytest

from tests.fuzz.catalogue import NAMES, load
from tests.fuzz.target import CORPUS, INPUT_S, dictionary, kept

BYTES_MAX = 1_000_000  # of all that is kept


@pytest.mark.parametrize("name", NAMES)
def test_the_invariant_holds_for_what_is_kept(name: str) -> None:
    target = load(name)
    assert all(target.check(each) for each in target.good)
    assert not any(target.check(each) for each in target.bad)
    for called, each in kept(name):
        began = time.monotonic()
        try:
            target.check(each)
        except Exception as error:
            error.add_note(f"input {called} of {name}")
            raise
        assert time.monotonic() - began < INPUT_S, called


def test_the_corpus_is_small_and_of_targets_that_there_are() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(NAMES)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < BYTES_MAX


def test_a_piece_is_written_as_libfuzzer_reads_it() -> None:
    assert dictionary(["a\n", b'"\xff', ""]) == '"\\x61\\x0a"\n"\\x22\\xff"\n'
