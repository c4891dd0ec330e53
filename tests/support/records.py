"""Pages with parts that are made: of records, between `<!-- record: NAME -->` and `<!-- end -->`; samples likewise."""

import re
from collections.abc import Callable
from typing import Final

RECORD: Final = "record"
SAMPLE: Final = "sample"


def marked(page: str, kind: str = RECORD) -> set[str]:
    """The names that a page has a place for."""
    return {found[2] for found in _marked(kind).finditer(page)}


def filled(page: str, made: Callable[[str], str], kind: str = RECORD) -> str:
    """The page with what is made for each name, which ends in a line feed."""
    return _marked(kind).sub(lambda found: f"{found[1]}{made(found[2])}{found[3]}", page)


def _marked(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {kind}: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
