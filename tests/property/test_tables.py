"""Tables on a terminal: at any width no line is too long, and each row says whose it is."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nri_gpu.cli import terminal
from nri_gpu.cli.page import Column, Grid

COLUMNS = (
    Column("GPU", repeated=True),
    Column("MODEL", name=True),
    Column("HELD BY", name=True, repeated=True),
    Column("FOR"),
    Column("IDLE"),
    Column("WHY", prose=True),
)
words = st.text("abc-/", min_size=1, max_size=99)
cells = st.sampled_from(["-", "", "2h5m", "3h, 180 samples"])
rows = st.lists(st.tuples(words, words, cells, cells, st.sampled_from(["", "a fault " * 20])), min_size=1, max_size=9)


@given(rows, st.lists(st.booleans(), min_size=9, max_size=9), st.integers(20, 300), st.booleans())
def test_no_line_is_too_long_and_each_row_is_told(
    found: list[tuple[str, str, str, str, str]], goes_on: list[bool], width: int, whole: bool
) -> None:
    numbered = [
        ("" if more and at else str(at), *row) for at, (row, more) in enumerate(zip(found, goes_on, strict=False))
    ]
    grid = Grid(COLUMNS, tuple(numbered), whole=whole)
    written = io.StringIO()
    terminal.show([grid], Console(file=written, width=width))
    lines = written.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    named = [number for number, *_ in numbered if number]
    first = lines[: lines.index("")] if "" in lines else lines
    assert [line.split()[0] for line in first if line[0].isdigit()] == named


@given(st.text(max_size=120), st.integers(1, 100), st.sampled_from(["…", "..."]))
def test_an_elided_text_is_its_beginning_and_its_end(text: str, width: int, sign: str) -> None:
    shown = terminal.elide(text, width, sign)
    assert len(shown) <= width
    cuts = [at for at in range(len(shown)) if shown.startswith(sign, at)]  # a text may have the sign itself
    fits = [text.startswith(shown[:at]) and text.endswith(shown[at + len(sign) :]) for at in cuts]
    assert shown == text or not cuts or any(fits)
    assert len(text) > width or shown == text
