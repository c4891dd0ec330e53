"""The pages on a terminal, by rich, which only this module imports: in colour, and readable at any width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from nri_gpu.cli.page import Column, Grid, Line, Page, Tone, printable

GAP: Final = 2  # blanks between columns
PROSE_MIN: Final = 24  # a sentence in fewer columns cannot be read
NOTHING: Final = ("", "-")  # cells that say nothing


def show(page: Page, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print(drawn(page, console.width))


def show_each(pages: Iterable[Page], console: Console | None = None) -> None:
    """Draw one page after the other on a screen of its own, which goes away in the end."""
    console = console or Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for page in pages:
            live.update(_cut(page, console), refresh=True)


def _cut(page: Page, console: Console) -> SegmentLines:
    """Return what of the page fits the screen, and how much does not."""
    lines = console.render_lines(drawn(page, console.width), pad=False)
    if len(lines) > console.height:
        more = len(lines) - console.height + 1
        last = Text(f"{more} more lines: make the window taller", Tone.WARN, no_wrap=True)
        lines = [*lines[: console.height - 1], *console.render_lines(last, pad=False)]
    return SegmentLines(lines, new_lines=True)


def drawn(page: Page, width: int) -> Group:
    """Return the page for a terminal of that many columns."""
    parts: list[Text | Table] = []
    for part in page:
        if isinstance(part, Grid):
            for number, block in enumerate(_blocks(part, width)):
                parts += [Text(""), block] if number else [block]
        else:
            parts.append(Text(_wrapped(printable(part.text), width), part.tone, no_wrap=True))
    return Group(*parts)


def show_whole(lines: Sequence[Line], console: Console | None = None) -> None:
    """Print lines as they are, in colour. The terminal wraps a line that is too long, so that it is copied whole."""
    console = console or Console(highlight=False)
    for line in lines:
        console.print(Text(printable(line.text), line.tone), soft_wrap=True)


def _wrapped(text: str, width: int) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _blocks(grid: Grid, width: int) -> Iterator[Table]:
    """Yield the table, in as many tables below each other as the width needs; each has the first column.

    A table leaves out rows about which it has nothing to say; the first table names every row that has a name.
    """
    rows = [tuple(map(_cell, row)) for row in grid.rows]
    widths = [max([len(column.head), *(len(row[at]) for row in rows)]) for at, column in enumerate(grid.columns)]
    for number, chosen in enumerate(_fitting(grid.columns, widths, width)):
        told = chosen[1:] if number else chosen
        kept = [row for row in rows if any(row[at].plain not in NOTHING for at in told)]
        if not kept:
            continue
        made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for at in chosen:
            wraps = grid.columns[at].prose or widths[0] + GAP + widths[at] > width
            made.add_column(Text(grid.columns[at].head), no_wrap=not wraps, overflow="fold")
        for row in kept:
            made.add_row(*(row[at] for at in chosen))
        yield made


def _cell(cell: str | Line) -> Text:
    return Text(printable(str(cell)), cell.tone if isinstance(cell, Line) else Tone.PLAIN)


def _fitting(columns: Sequence[Column], widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns that stand beside each other: the first, and as many of the rest as there is room for."""
    chosen, room = [0], width - widths[0]
    for at in range(1, len(columns)):
        needed = GAP + (min(widths[at], PROSE_MIN) if columns[at].prose else widths[at])
        if needed > room and len(chosen) > 1:
            yield chosen
            chosen, room = [0], width - widths[0]
        chosen.append(at)
        room -= GAP + widths[at]
    yield chosen
