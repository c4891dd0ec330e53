"""Files that are checked in and made of something else: what each has to be, compared with what it is."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
SHOWN: Final = 40  # lines of a difference


class LackingError(Exception):
    """A file cannot be made here: the message names what is missing."""


class Drawn(NamedTuple):
    """A picture, which is drawn again only where it does not end in the mark of its source."""

    mark: str
    draw: Callable[[], str]


# By path, what each has to be: its text, or None where there must be no file.
Files = Mapping[Path, str | Drawn | None]


def picture(source: bytes, draw: Callable[[], str]) -> Drawn:
    """Return a picture that carries the SHA-256 of its source as its last line."""
    mark = f"<!-- made of a source with SHA-256 {hashlib.sha256(source).hexdigest()} -->\n"
    return Drawn(mark, lambda: draw() + mark)


def stale(files: Files) -> Iterator[Path]:
    """Yield each path that is not as it has to be, without drawing pictures."""
    for path, wanted in files.items():
        have = path.read_text(encoding="utf-8") if path.is_file() else None
        if have is None or not isinstance(wanted, Drawn):
            if have != wanted:
                yield path
        elif not have.endswith(wanted.mark):
            yield path


def write(files: Files) -> None:
    """Make all of them as they have to be."""
    for path in stale(files):
        wanted = files[path]
        if wanted is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted.draw() if isinstance(wanted, Drawn) else wanted, encoding="utf-8")


def faults(files: Files) -> Iterator[str]:
    """Yield a line for each that is stale, and the difference of a text."""
    for path in sorted(stale(files)):
        wanted = files[path]
        yield f"{path.relative_to(ROOT)} is not what its source says: run `make generate`"
        if isinstance(wanted, str) and path.is_file():
            have = path.read_text(encoding="utf-8").splitlines()
            yield from islice(difflib.unified_diff(have, wanted.splitlines(), "is", "has to be", lineterm=""), SHOWN)
