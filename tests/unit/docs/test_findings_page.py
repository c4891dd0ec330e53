"""docs/findings.md has each kind of finding of an observer, and whoever is quiet by default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.observe.usual_users import quiet_patterns
from nri_gpu.policy.model import Policy

PAGE: Final = (Path(__file__).parents[3] / "docs" / "findings.md").read_text()


def rows(section: str) -> list[str]:
    """The rows of a section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_it_has_each_kind_and_no_other() -> None:
    kinds = [found[1] for row in rows("The findings") if (found := re.match(r"\| `([a-z-]+)` \|", row))]
    assert sorted(kinds) == sorted(FindingKind)


def test_it_has_whoever_is_quiet_by_default_and_nobody_else() -> None:
    listed = [pattern for row in rows("What is quiet") for pattern in re.findall("`([^`]+)`", row)]
    assert sorted(listed) == sorted(quiet_patterns(Policy.default()).patterns)
