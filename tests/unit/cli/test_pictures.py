"""The screenshots in docs show what the programs print now."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests import film
from tests.pictures import FOLDER, PICTURES, drawn, words

PAGES = (FOLDER.parents[1] / "README.md", *FOLDER.parent.rglob("*.md"))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert words(text) == words(drawn(name)), "run `make generate WHAT=pictures`"


@pytest.mark.parametrize("name", [*PICTURES, film.NAME])
def test_pictures_are_shown_and_need_no_network(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert any(f"pictures/{name})" in page.read_text() for page in PAGES)


def test_a_recording_shows_line_after_line_and_stands_still_on_the_last() -> None:
    lines = [f"\x1b[1mline {number}\x1b[0m" for number in range(40)]
    made = film.film("\r\n".join([*lines[:20], "", *lines[20:], "wide " * 21]))
    rows = film.FIRST - 43
    assert film.lasting(made).split("line ")[1:-1] == [f"{number} " for number in range(39)]
    assert made.count('font-weight: bold"') == 0
    for name, ends in (("roll", film.ROWS - 43), ("cover", 43)):
        frames = re.search(rf"@keyframes {name} {{\n(.*?)\n}}", made, re.DOTALL)
        assert frames
        moved = re.findall(r"([\d.]+)% { transform: translateY\((-?[\d.]+)px\) }", frames[1])
        assert len(moved) == 1 - rows
        assert [float(at) for at, _ in moved] == sorted({float(at) for at, _ in moved})
        assert float(moved[-1][1]) == pytest.approx(ends * film.LINE, abs=0.1)
        # The same without the animation, which a viewer may not know.
        assert f'class="{name}" ' in made
        assert re.search(rf'class="{name}"[^>]* transform="translate\(0, {moved[-1][1]}\)"', made)
