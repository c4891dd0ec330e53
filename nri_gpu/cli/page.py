"""The page that a verb prints: lines and tables, plain in a pipe, fit to the width and in colour on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct, to_builtins

from nri_gpu.domain.text import printable


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
    """A column. prose: sentences, which a narrow terminal may wrap.

    name: names, of which a narrow terminal shows beginning and end. repeated: in each part of a table that has parts.
    """

    head: str
    prose: bool = False
    name: bool = False
    repeated: bool = False


Cell = str | Line
Row = tuple[Cell, ...]


class Grid(Struct, frozen=True):
    """A table. Its first column names the rows; a row in which it is empty goes on with the row above.

    whole: names are never elided, but where a part below the first repeats them.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    whole: bool = False

    @property
    def filled(self) -> tuple[Row, ...]:
        """Return the rows, with the empty cells of each that goes on as they are in the row above."""
        rows: list[Row] = []
        for row in self.rows:
            above = rows[-1] if rows and not str(row[0]) else row
            rows.append(tuple(cell if str(cell) else over for cell, over in zip(row, above, strict=True)))
        return tuple(rows)


Page = Sequence[Line | Grid]


def filtered(page: Page, words: str) -> list[Line | Grid]:
    """Return the page with those rows of its tables, and those lines below them, that have these words in any case."""
    found: list[Line | Grid] = []
    below = False
    for part in page:
        if isinstance(part, Grid):
            below = True
            rows = tuple(row for row in part.filled if _have(words, *map(str, row)))
            found.append(Grid(part.columns, rows) if rows else Line("no row has it"))
        elif not below or _have(words, part.text):
            found.append(part)
    return found


def _have(words: str, *texts: str) -> bool:
    return any(words.lower() in text.lower() for text in texts)


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
    return rows_of([tuple(heads), *rows])


def rows_of(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table without heads."""
    lines = [tuple(printable(str(cell)) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return ["  ".join(line).rstrip() for line in padded]


def json_text(document: object) -> str:
    """Return the document that `-o json` prints. Its schema is in api/schemas."""
    return json.dumps(to_builtins(document), indent=1)
