"""The page that a verb prints: lines and tables, plain in a pipe, fit to the width and in colour on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct, to_builtins


class Tone(StrEnum):
    """The look of a text on a terminal, as a style of rich."""

    PLAIN = "none"
    HEAD = "bold"
    GOOD = "green"
    LINK = "cyan"
    WARN = "yellow"
    BAD = "bold red"
    FAINT = "dim"


class Line(Struct, frozen=True):
    """A text in a tone. A line too long for a terminal goes on below, indented."""

    text: str
    tone: Tone = Tone.PLAIN

    def __str__(self) -> str:
        return self.text


class Column(Struct, frozen=True):
    """A column. prose: sentences, which a narrow terminal may wrap."""

    head: str
    prose: bool = False


Row = tuple[str | Line, ...]


class Grid(Struct, frozen=True):
    """A table. Its first column names the rows; a row in which it is empty goes on with the row above."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


Page = Sequence[Line | Grid]


def plain(page: Page) -> str:
    """Return the page as text, each column as wide as its widest cell."""
    lines: list[str] = []
    for part in page:
        if isinstance(part, Grid):
            lines += table([each.head for each in part.columns], part.rows)
        else:
            lines.append(printable(part.text))
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table. Columns are as wide as their widest cell."""
    lines = [tuple(heads), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["  ".join(line).rstrip() for line in padded]


def printable(text: str) -> str:
    """Return the text without what a terminal would take as a command: a pod's name is anybody's choice."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def json_text(document: object) -> str:
    """Return the document that `-o json` prints. Its schema is in api/schemas."""
    return json.dumps(to_builtins(document), indent=1)
