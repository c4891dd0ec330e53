"""Where a key stands in its file."""

from __future__ import annotations

import pytest

from nri_gpu.policy.lines import key_lines, line_of

FILES = {
    "dotted keys": ("a . b = 1\n[c.d]\ne=1", {"a.b": 1, "c.d": 2, "c.d.e": 3}),
    "quoted keys": ("\"a\" = 1\n['b']\n'c d' = 2", {"a": 1, "b": 2, "b.c d": 3}),
    "lists of tables below others": (
        "[[r]]\n[[r.x]]\na=1\n[[r.x]]\n[r.y]\nb=1\n[[r]]\n[[r.x]]\na=2",
        {
            **{"r[0]": 1, "r[0].x[0]": 2, "r[0].x[0].a": 3, "r[0].x[1]": 4, "r[0].y": 5, "r[0].y.b": 6},
            **{"r[1]": 7, "r[1].x[0]": 8, "r[1].x[0].a": 9},
        },
    ),
    "a heading that is an item": ("a = [\n[1],\n]\nb=1", {"a": 1, "b": 4}),
    "an escaped quote before the end": ('a = """x\\"""\nb = 1\n"""\nd = 1', {"a": 1, "d": 4}),
    "a string that ends where it begins": ('a = """x"""\nb = 1', {"a": 1, "b": 2}),
    "windows": ("[a]\r\nb = 1\r\n", {"a": 1, "a.b": 2}),
    "the first of two": ("a = 1\na = 2", {"a": 1}),
    "garbage": ("]]]\n= 1\n\x00\na = 1", {"a": 4}),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES.keys())
def test_lines(text: str, expected: dict[str, int]) -> None:
    assert key_lines(text) == expected


@pytest.mark.parametrize(("path", "line"), [("r[1].a", 3), ("r[1].b", 2), ("r[1].c[0].d", 2), ("s", None), ("", None)])
def test_what_has_no_line_has_that_of_what_it_is_in(path: str, line: int | None) -> None:
    assert line_of(key_lines("[[r]]\n[[r]]\na=1"), path) == line
