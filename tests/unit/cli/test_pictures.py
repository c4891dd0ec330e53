"""The screenshots in docs show what the programs print now."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.pictures import FOLDER, PICTURES, drawn, words


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date_and_need_no_network(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert words(text) == words(drawn(name)), "run `make generate WHAT=pictures`"
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert f"pictures/{name})" in "".join(page.read_text() for page in FOLDER.parent.rglob("*.md"))
