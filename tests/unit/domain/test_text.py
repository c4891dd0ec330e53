"""Text of others in a sentence, and guesses at what an unknown word was meant to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nri_gpu.domain.text import clipped, counted, did_you_mean, quoted


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
    assert quoted(text, 40) == shown


def test_clipped() -> None:
    assert clipped("abcdef", 6) == "abcdef"
    assert clipped("abcdefg", 6) == "abc..."


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [("mdoe", "mode", True), ("contaner", "container", True), ("xyz", "mode", False), ("", "all", False)],
)
def test_a_close_word_is_guessed(word: str, known: str, meant: bool) -> None:
    assert did_you_mean(word, [known]) == (f' (did you mean "{known}"?)' if meant else "")


def test_nothing_is_guessed_from_a_long_word() -> None:
    assert did_you_mean("m" * 25, ["m" * 24]) == ""


def test_one_function_counts() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2, 1234)] == ["0 GPUs", "1 GPU", "2 GPUs", "1,234 GPUs"]
    package = Path(__file__).parents[3] / "nri_gpu"
    by_hand = re.compile(r"'s' \* \(.* (?:>|!=) ")
    assert [file.name for file in package.rglob("*.py") if by_hand.search(file.read_text())] == ["text.py"]
