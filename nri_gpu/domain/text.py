"""Text of strangers as sentences show it, and the known word that an unknown word was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

QUOTE_MAX: Final = 48  # characters; a refusal has 700 for its whole sentence
# Units of sizes, as Kubernetes writes them.
SIZE_UNITS: Final = {
    **{"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
_WORD_MAX: Final = 24  # characters; a longer word is never a slip of a known one


def shown(text: str, limit: int = QUOTE_MAX) -> str:
    """Make the text fit for a log line or an event: ASCII, escaped, clipped to `limit` characters and dots."""
    body = ascii(text[:limit])[1:-1]
    return f"{body[:limit]}..." if len(text) > limit or len(body) > limit else body


def quoted(text: str, limit: int = QUOTE_MAX) -> str:
    """Do as `shown`, in double quotes."""
    return f'"{shown(text, limit)}"'


def clipped(text: str, limit: int) -> str:
    """Cut the text to at most `limit` characters; if it is longer, the last three are dots. Does not escape."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return `a, b and 3 more`."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """Return `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """Return the text without what a terminal would take as a command: a pod's name is anybody's choice."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "count"?)` if a known word is close, or empty."""
    close = get_close_matches(word.lower(), known, n=1) if len(word) <= _WORD_MAX else []
    return f' (did you mean "{close[0]}"?)' if close else ""
