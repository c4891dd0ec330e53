"""How an image's text is shown in a sentence."""

from __future__ import annotations

from typing import Final

QUOTE_MAX: Final = 48  # characters of hostile text; a sentence has SENTENCE_MAX for all of it
SENTENCE_MAX: Final = 400  # characters


def shown(text: str, limit: int = QUOTE_MAX) -> str:
    """Untrusted text as it may stand in a log line or an event: ASCII, escaped, clipped."""
    body = ascii(text[:limit])[1:-1]
    return f"{body[: limit - 3]}..." if len(text) > limit or len(body) > limit else body


def quoted(text: str) -> str:
    """The same between quotes."""
    return f'"{shown(text)}"'


def sentence(text: str) -> str:
    """Never longer than what an event has room for."""
    return text if len(text) <= SENTENCE_MAX else f"{text[: SENTENCE_MAX - 4]}...."
