"""Pieces know their positions."""

from __future__ import annotations

from nri_gpu.request.values import Piece


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
