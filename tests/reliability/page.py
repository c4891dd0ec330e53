"""docs/reliability.md: the tables between its markers are made of the record; the words around them by hand."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from tests.reliability.result import PROJECT, Part, PartName, Record, Row, read
from tests.support.records import filled, marked

PAGE: Final = PROJECT / "docs" / "reliability.md"
WIDTH: Final = 120


def render(path: Path = PAGE) -> None:
    """Put the record's tables into the page."""
    path.write_text(rendered(path.read_text(), read()))


def rendered(text: str, record: Record) -> str:
    """The page with the record's tables in it. Raises: ValueError: it has no place for a part, or no such part."""
    if missing := record.parts.keys() - set(map(PartName, marked(text))):
        raise ValueError(f"the page has no markers for {', '.join(sorted(missing))}")
    return filled(text, lambda name: _section(record, PartName(name)))


def _section(record: Record, name: PartName) -> str:
    part = record.parts.get(name)
    return "\n".join(table(part)) + "\n" if part else "Not run yet.\n"


def table(part: Part) -> Iterator[str]:
    """Lines of Markdown: when and where it ran, a table, and the command that repeats a row by its case."""
    machine = ", ".join(f"{what} {value}" for what, value in part.machine.items())
    yield from textwrap.wrap(f"Run on {part.date} in {part.took_s / 60:.0f} min; {machine}.", WIDTH)
    yield ""
    yield "| case | what was done | how often | what came of it | passed |"
    yield "|---|---|---|---|---|"
    for row in _beside(part.rows):
        cells = (_case(row), row.what, f"{row.count:,} {row.unit}", row.outcome, "yes" if row.passed else "**no**")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for command in dict.fromkeys(row.command.replace(f"--case {_case(row)}", "--case CASE") for row in part.rows):
        yield f"To repeat a row: `{command}`"


def _beside(rows: Iterable[Row]) -> Iterator[Row]:
    """Join the rows of one case, which are what was done to one program and to another: `PROGRAM: what`."""
    cases = defaultdict[str, list[Row]](list)
    for row in rows:
        cases[row.command].append(row)
    for same in cases.values():
        if len(same) > 1 and all(": " in row.what for row in same):
            what, outcome = (
                same[0].what.partition(": ")[2],
                [f"{row.what.partition(': ')[0]}: {row.outcome}" for row in same],
            )
            yield replace(same[0], what=what, outcome=". ".join(outcome), passed=all(row.passed for row in same))
        else:
            yield from same


def _case(row: Row) -> str:
    """The word after --case, or empty."""
    return row.command.partition("--case ")[2].partition(" ")[0]


def line(row: Row) -> str:
    """The row for a terminal."""
    mark = "ok  " if row.passed else "FAIL"
    return f"{mark} {row.what}: {row.count:,} {row.unit}\n     {row.outcome}\n     {row.command}"
