"""The part of a live page that is shown: what each key does to it. Its terminal is in tests/system/test_watch.py."""

from __future__ import annotations

import pytest

from nri_gpu.cli.live_screen import KEY, Scroller
from nri_gpu.cli.page import Column, Grid, Line, Page, filtered

LINES, ROWS = 50, 10


def pressed(keys: bytes) -> tuple[Scroller, bool]:
    """After these keys, and whether one of them asked for the end."""
    scroller = Scroller()
    ended = [scroller.press(key, LINES, ROWS) for key in KEY.findall(keys)]
    return scroller, any(ended)


@pytest.mark.parametrize(
    ("keys", "top"),
    [
        (b"", 0),
        (b"\x1b[B\x1b[B\x1b[A", 1),
        (b"\x1bOB\x1bOBj", 3),
        (b"\x1b[A", 0),
        (b"\x1b[6~", 10),
        (b"  b", 10),
        (b"\x1b[F", 40),
        (b"G\x1b[6~", 40),
        (b"\x1b[4~\x1b[1~", 0),
        (b"\x1b[F\x1b[H", 0),
        (b"\x1b[6~x\x1b[Z\x1b[15~", 10),  # keys that mean nothing here
    ],
)
def test_keys_that_scroll(keys: bytes, top: int) -> None:
    assert pressed(keys)[0].top == top


@pytest.mark.parametrize(
    ("keys", "words", "typing", "ended"),
    [
        (b"q", "", False, True),
        (b"/q", "q", True, False),
        (b"/train\r", "train", False, False),
        (b"/train\nq", "train", False, True),
        (b"/trk\x7fain", "train"[:2] + "ain", True, False),
        (b"/\x7f\x08", "", True, False),
        (b"/train\x1b", "", False, False),
        (b"/train\r\x1b", "", False, False),
        (b"/a\r/", "", True, False),
        (b"/a\x00\x1b[Bb", "ab", True, False),  # what is no letter is none of the words
        ("/über".encode(), "über", True, False),
    ],
)
def test_keys_that_filter_or_end(keys: bytes, words: str, typing: bool, ended: bool) -> None:
    scroller, end = pressed(keys)
    assert (scroller.words, scroller.typing, end) == (words, typing, ended)


def test_a_filter_shows_the_page_from_its_beginning() -> None:
    assert pressed(b"G/a")[0].top == 0


def test_the_last_line_says_where_one_is_and_what_keys_do() -> None:
    scroller, _ = pressed(b"\x1b[6~")
    keys = "q ends, / filters, arrows, PgUp, PgDn, Home, End scroll"
    assert scroller.footer(LINES, ROWS, keys=True) == f"lines 11 to 20 of 50; {keys}"
    assert scroller.footer(ROWS, ROWS, keys=True) == keys
    assert scroller.footer(ROWS, ROWS, keys=False).endswith("which ends it")
    scroller, _ = pressed(b"/a\r")
    assert scroller.footer(5, ROWS, keys=True) == f"filtered by 'a', Esc ends that; {keys}"


def test_a_filter_keeps_what_stands_above_the_table_and_a_rows_gpu() -> None:
    columns = (Column("GPU"), Column("HELD BY"))
    above, below, other = Line("node-7"), Line("GPU 1 is bad: Train"), Line("kubelet")
    page: Page = [above, Grid(columns, (("0", "ml/a"), ("", "ml/TRAIN"), ("1", "-"))), below, other]
    assert filtered(page, "train") == [above, Grid(columns, (("0", "ml/TRAIN"),)), below]
    assert filtered(page, "nothing") == [above, Line("no row has it")]
