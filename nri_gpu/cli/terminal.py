"""The pages on a terminal, by rich, which only this module imports: in colour, and readable at any width."""

from __future__ import annotations

import locale
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from rich.console import Console, Group
from rich.text import Text

from nri_gpu.cli.page import Cell, Grid, Line, Page, Tone
from nri_gpu.domain.text import printable

GAP: Final = 2  # blanks between columns
PROSE_MIN: Final = 24  # a sentence in fewer columns cannot be read
NAME_MIN: Final = 16  # a name in fewer columns is not told from others
NARROW: Final = 40  # columns of a terminal below which a name has to do with half of that
ELIDED: Final = "\u2026"
HINT: Final = "long names are elided: a wider terminal or a pipe has them whole"
NOTHING: Final = ("", "-")  # cells that say nothing


def show(page: Page, console: Console | None = None) -> None:
    console = console or new_console()
    console.print(drawn(page, console.width, sign_of(console)))


def new_console() -> Console:
    return Console(highlight=False)


def painted(page: Page, console: Console) -> list[str]:
    """Return the lines of a page with the colours of that terminal."""
    with console.capture() as captured:
        console.print(drawn(page, console.width, sign_of(console)))
    return captured.get().splitlines()


def sign_of(console: Console) -> str:
    """Return the sign in the middle of an elided name, in letters that the terminal's locale has.

    In the locale C, Python writes UTF-8 all the same.
    """
    locales = locale.nl_langinfo(locale.CODESET) if console.file is sys.stdout else "utf-8"
    try:
        ELIDED.encode(console.encoding)
        ELIDED.encode(locales)
    except (UnicodeEncodeError, LookupError):
        return "..."
    return ELIDED


def drawn(page: Page, width: int, sign: str = ELIDED) -> Group:
    """Return the page for a terminal of that many columns. sign: in the middle of an elided name."""
    parts: list[Text] = []
    for part in page:
        if isinstance(part, Grid):
            blocks = _Blocks(part, width, sign)
            for number, block in enumerate(blocks):
                parts += [Text(""), *block] if number else block
            if blocks.elided:
                parts.append(Text(_wrapped(HINT, width), Tone.FAINT, no_wrap=True))
        else:
            parts.append(Text(_wrapped(printable(part.text), width), part.tone, no_wrap=True))
    return Group(*parts)


def show_whole(lines: Sequence[Line], console: Console | None = None) -> None:
    """Print lines as they are, in colour. The terminal wraps a line that is too long, so that it is copied whole."""
    console = console or new_console()
    for line in lines:
        console.print(Text(printable(line.text), line.tone), soft_wrap=True)


def _wrapped(text: str, width: int) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def elide(text: str, width: int, sign: str = ELIDED) -> str:
    """Return a text of at most that many columns: its beginning, the sign, and its end."""
    if len(text) <= width:
        return text
    kept = max(width - len(sign), 1)
    end = kept // 2
    return f"{text[: kept - end]}{sign}{text[len(text) - end :]}"[:width]


class _Blocks:
    """A table, in as many tables below each other as the width needs; each has the columns that are repeated.

    A table below the first leaves out rows about which it has nothing to say. elided: whether a name was that no table
    has whole.
    """

    def __init__(self, grid: Grid, width: int, sign: str) -> None:
        self.elided = False
        self._grid, self._width, self._sign = grid, width, sign
        self._rows = [tuple(map(_cell, row)) for row in grid.rows]
        self._first = [_cell(row[0]) for row in grid.filled]
        columns = range(len(grid.columns))
        self._wide = [max([len(grid.columns[at].head), *(len(row[at].text) for row in self._rows)]) for at in columns]
        self._repeated = {at for at in columns if not at or grid.columns[at].repeated}

    def __iter__(self) -> Iterator[list[Text]]:
        """Yield the lines of each table."""
        chosen: list[int] = []
        number = 0
        for at in range(len(self._wide)):
            beside = sorted({*chosen, *self._repeated, at})
            if {*chosen} - self._repeated and at not in self._repeated and self._needed(beside, number) > self._width:
                yield from self._table(chosen, number)
                chosen, number = [], number + 1
            chosen.append(at)
        yield from self._table(chosen, number)

    def _least(self, at: int, number: int) -> int:
        """Return the columns that a column needs at least in that table, the first being number 0."""
        column, wide = self._grid.columns[at], self._wide[at]
        if column.name and (number or not self._grid.whole):
            return min(wide, NAME_MIN if self._width >= NARROW else NAME_MIN // 2)
        return min(wide, PROSE_MIN) if column.prose else wide

    def _needed(self, chosen: Sequence[int], number: int) -> int:
        return sum(self._least(at, number) for at in chosen) + GAP * (len(chosen) - 1)

    def _table(self, others: list[int], number: int) -> Iterator[list[Text]]:
        """Yield the table of these columns, and of the repeated ones, unless it has no row."""
        chosen = sorted({*others, *self._repeated})
        told = [at for at in chosen if at not in self._repeated] if number else chosen
        kept = [place for place, row in enumerate(self._rows) if any(row[at].text not in NOTHING for at in told)]
        if not kept:
            return
        widths = self._fitted(chosen, number)
        lines = _row([Line(self._grid.columns[at].head, Tone.HEAD) for at in chosen], [*widths.values()])
        for place in kept:
            cells = (self._rows[place][at] if at or not number else self._first[place] for at in chosen)
            short = [self._short(cell, at, widths[at], number) for at, cell in zip(chosen, cells, strict=True)]
            lines += _row(short, [*widths.values()])
        yield lines

    def _short(self, cell: Line, at: int, width: int, number: int) -> Line:
        if not self._grid.columns[at].name or len(cell.text) <= width or (self._grid.whole and not number):
            return cell
        self.elided |= not self._grid.whole
        return Line(elide(cell.text, width, self._sign), cell.tone)

    def _fitted(self, chosen: Sequence[int], number: int) -> dict[int, int]:
        """Return the width of each column: the widest gives way, to what it needs at least, and at last below that."""
        widths = {at: self._wide[at] for at in chosen}
        room = max(self._width - GAP * (len(chosen) - 1), len(chosen))
        for least in ({at: self._least(at, number) for at in chosen}, dict.fromkeys(chosen, 1)):
            while sum(widths.values()) > room and (able := [at for at in chosen if widths[at] > least[at]]):
                widths[max(able, key=lambda at: widths[at])] -= 1
        return widths


def _row(cells: Sequence[Line], widths: Sequence[int]) -> list[Text]:
    """Return the lines of a row: one, unless a cell is wider than its column and goes on below."""
    wrapped = [
        textwrap.wrap(cell.text, width, break_on_hyphens=False) if len(cell.text) > width else [cell.text]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines: list[Text] = []
    for pieces in zip_longest(*wrapped, fillvalue=""):
        line = Text(no_wrap=True)
        for piece, cell, width in zip(pieces, cells, widths, strict=True):
            line.append(piece, cell.tone)
            line.append(" " * (width - len(piece) + GAP))
        line.rstrip()
        lines.append(line)
    return lines


def _cell(cell: Cell) -> Line:
    return Line(printable(str(cell)), cell.tone if isinstance(cell, Line) else Tone.PLAIN)
