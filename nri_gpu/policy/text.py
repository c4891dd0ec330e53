"""How the keys and values of a policy file are named in its faults."""

from __future__ import annotations

from collections.abc import Iterable

from nri_gpu.domain.text import QUOTE_MAX, did_you_mean, quoted


def known_words(word: str, known: Iterable[str]) -> str:
    """` (did you mean "socket"?)` where a known word is close, else `, known: ...`."""
    words = list(known)
    return did_you_mean(word, words) or f", known: {', '.join(words)}"


def shown_key(key: str) -> str:
    """A key as it is where it is plain, else quoted as TOML would have it."""
    return key if key.isascii() and key.replace("-", "_").isidentifier() and len(key) <= QUOTE_MAX else quoted(key)


def toml_type(raw: object) -> str:
    """A value's type in the words of TOML's manual."""
    match raw:
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a float"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"
