"""Pictures on a dark page: each colour has a dark one, and what is checked in has the style of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import plots, reference
from tools.svg_theme import DARK, INK, with_dark_colours

PICTURES = sorted([*reference.diagrams(), *plots.plots()])


def test_colours_of_attributes_and_of_styles_get_a_rule() -> None:
    drawn = '<svg width="1">\n<a fill="#eef4fb" stroke="none"/><b style="fill: none; stroke: #000000"/>\n</svg>\n'
    start, style, rest = re.split(r"(<style>.*</style>\n)", with_dark_colours(drawn), flags=re.DOTALL)
    assert start + rest == drawn
    assert style.splitlines() == [
        "<style>@media (prefers-color-scheme: dark) {",
        f"text {{ fill: {INK}; }}",
        f'[fill="#eef4fb"] {{ fill: {DARK["#eef4fb"]} !important; }}',
        f'[style*="stroke: #000000"] {{ stroke: {INK} !important; }}',
        "}</style>",
    ]


def test_a_colour_without_a_dark_one_is_a_fault() -> None:
    with pytest.raises(KeyError, match="#123456"):
        with_dark_colours('<svg>\n<a fill="#123456"/></svg>')


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_that_is_checked_in_has_the_style_of_today_and_no_ground(picture: Path) -> None:
    text = picture.read_text()
    assert with_dark_colours(re.sub(r"<style>@media .*?</style>\n", "", text, flags=re.DOTALL)) == text
    assert not re.search("#ffffff|white", text)
