"""Where texts say that pages and examples are. What a package has is in tests/packages/test_manual.py."""

from __future__ import annotations

from pathlib import Path

from nri_gpu.cli.installed import findings_here, here
from nri_gpu.domain.finding import warning

ROOT = Path(__file__).parents[3]


def test_a_checkout_names_its_own_topologies() -> None:
    text = "nri-gpu gpus --gpus /usr/share/nri-gpu/topologies/four-gpus.toml"
    assert here(text) == f"nri-gpu gpus --gpus {ROOT}/config/topologies/four-gpus.toml"


def test_a_page_that_is_not_installed_keeps_its_name() -> None:
    found = warning("a", "see docs/no-such-page.md", "# docs/no-such-page.md says how")
    assert findings_here([found]) == (found,)
