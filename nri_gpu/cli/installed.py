"""Places of this installation's pages and examples, which texts name as packages or the repository have them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.finding import Finding

MANUAL: Final = Path("/usr/share/doc/nri-gpu")  # of a package; below it docs/, as in the repository
TOPOLOGIES: Final = Path("/usr/share/nri-gpu/topologies")
_PAGE: Final = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")


def here(text: str) -> str:
    """Return a text in which each page is named by its path, where it is installed, and topologies by theirs.

    A page that is not installed keeps its name, which the repository and the site know it by.
    """
    checkout, environment = Path(__file__).parents[2], Path(sys.prefix)
    places = (TOPOLOGIES, checkout / "config/topologies", environment / "share/nri-gpu/topologies")
    topologies = next((folder for folder in places if folder.is_dir()), TOPOLOGIES)
    text = text.replace(str(TOPOLOGIES), str(topologies))
    return _PAGE.sub(lambda found: str(path) if (path := MANUAL / found[0]).is_file() else found[0], text)


def findings_here(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings whose sentences and fixes name pages as `here` does."""
    return tuple(replace(each, meaning=here(each.meaning), fix=tuple(map(here, each.fix))) for each in findings)
