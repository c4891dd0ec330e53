"""Positions, quotes and guesses."""

from __future__ import annotations

import pytest

from nri_gpu.request.text import Piece, edits_between, guess, quoted


def test_cutting_leaves_blanks_out_and_keeps_the_place() -> None:
    assert Piece("k", "ab  cd ", 10).cut(2) == Piece("k", "cd", 14)


def test_splitting_an_empty_text_gives_one_empty_part() -> None:
    assert list(Piece("k", "", 3).split(",")) == [Piece("k", "", 3)]


def test_splitting_keeps_every_place() -> None:
    assert [(part.text, part.at) for part in Piece("k", "a, b,,c", 0).split(",")] == [
        ("a", 0),
        ("b", 3),
        ("", 5),
        ("c", 6),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc", '"abc"'),
        ("a\nb", '"a\\nb"'),
        ("\u20ac", '"\\u20ac"'),
        ("x" * 41, '"' + "x" * 40 + '..."'),
        ("\U0001f600" * 9, '"' + "\\U0001f600" * 4 + '..."'),
    ],
)
def test_quoted(text: str, shown: str) -> None:
    assert quoted(text) == shown


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("", "abc", 3), ("abc", "abc", 0), ("mdoe", "mode", 1), ("contaner", "container", 1), ("kitten", "sitting", 3)],
)
def test_edits_between(a: str, b: str, edits: int) -> None:
    assert edits_between(a, b) == edits_between(b, a) == edits


def test_nothing_is_guessed_from_afar_or_from_a_long_word() -> None:
    assert guess("xyz", ["mode"]) == ""
    assert guess("", ["all"]) == ""
    assert guess("m" * 25, ["m" * 24]) == ""
