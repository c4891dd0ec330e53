"""How an operator's, or a stranger's, text is shown in a sentence, and what was probably meant by an unknown word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

QUOTE_MAX: Final = 60  # characters


def quoted(text: str, limit: int = QUOTE_MAX) -> str:
    """ASCII, escaped, clipped: fit for a log line and for an event."""
    body = ascii(text[:limit])[1:-1]
    clipped = len(text) > limit or len(body) > limit
    return f'"{body[:limit]}..."' if clipped else f'"{body}"'


def known_words(word: str, known: Iterable[str]) -> str:
    """` (did you mean "socket"?)` where one is close, else `, known: ...`."""
    from difflib import get_close_matches  # here, because only a broken file needs it

    words = list(known)
    close = get_close_matches(word.lower()[:QUOTE_MAX], words, n=1)
    return f' (did you mean "{close[0]}"?)' if close else f", known: {', '.join(words)}"


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
