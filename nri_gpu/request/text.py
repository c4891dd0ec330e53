"""Pieces of an untrusted value that know where they stand, and how such text is shown in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from nri_gpu.domain.errors import RequestError

BLANKS: Final = " \t"
QUOTE_MAX: Final = 40  # characters of hostile text shown: a refusal has 700 for its whole sentence
WORD_MAX: Final = 24  # characters; longer words are never guessed at, so a guess costs nothing to speak of


class Piece(NamedTuple):
    """A part of an annotation's value without the blanks around it.

    key: the annotation it stands in, fit to be shown. at: 0-based offset into the value.
    """

    key: str
    text: str
    at: int

    def error(self, message: str) -> RequestError:
        """A fault at this very place."""
        return RequestError(self.key, message, self.at)

    def cut(self, start: int, end: int | None = None) -> Piece:
        """The part from start to end, blanks around it left out."""
        raw = self.text[start:end]
        text = raw.lstrip(BLANKS)
        return Piece(self.key, text.rstrip(BLANKS), self.at + start + len(raw) - len(text))

    def split(self, separator: str) -> Iterator[Piece]:
        """The parts between separators; an empty text has one empty part."""
        start = 0
        while (end := self.text.find(separator, start)) >= 0:
            yield self.cut(start, end)
            start = end + 1
        yield self.cut(start)


def quoted(text: str, limit: int = QUOTE_MAX) -> str:
    """Untrusted text as it may stand in a log line or an event: ASCII, escaped, clipped."""
    body = ascii(text[:limit])[1:-1]
    clipped = len(text) > limit or len(body) > limit
    return f'"{body[:limit]}..."' if clipped else f'"{body}"'


def listed(words: Iterable[str]) -> str:
    """`a, b, c`, as written after "known:"."""
    return ", ".join(words)


def guess(word: str, known: Iterable[str]) -> str:
    """` (did you mean "count"?)` where a known word is close, else nothing."""
    if not 0 < len(word) <= WORD_MAX:
        return ""
    close = [(distance, name) for name in known if (distance := edits_between(word.lower(), name)) <= len(name) // 3]
    return f' (did you mean "{min(close)[1]}"?)' if close else ""


def edits_between(a: str, b: str) -> int:
    """How many letters must be added, dropped, changed or swapped with a neighbour to make b of a."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
