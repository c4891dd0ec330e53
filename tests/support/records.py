"""Pages whose tables are made of records: what stands between `<!-- record: NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Callable
from typing import Final

_MARKED: Final = re.compile(r"(<!-- record: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def marked(page: str) -> set[str]:
    """The names that a page has a place for."""
    return {found[2] for found in _MARKED.finditer(page)}


def filled(page: str, made: Callable[[str], str]) -> str:
    """The page with what is made for each name, which ends in a line feed."""
    return _MARKED.sub(lambda found: f"{found[1]}{made(found[2])}{found[3]}", page)
