"""docs/extras.md names every extra with its default, and its examples are ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from nri_gpu.domain.edits import HARMLESS, Extra
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.select import Terms
from nri_gpu.request.annotation import parse_claim

TEXT = (Path(__file__).parents[3] / "docs" / "extras.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)(?::N)?` \|.*\| (yes|no) \|$", TEXT, re.MULTILINE)
YAML, POLICY = (body for _, body in re.findall(r"^```(yaml|toml)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def test_every_extra_has_its_row_with_its_default() -> None:
    assert [(word, answer == "yes") for word, answer in sorted(ROWS)] == [(e, e in HARMLESS) for e in sorted(Extra)]


def test_the_policy_allows_what_the_pod_asks_for() -> None:
    (value,) = yaml.safe_load(YAML)["metadata"]["annotations"].values()
    claim = parse_claim("gpu.nri.io", value)
    assert claim.extras.channels == (0,)
    assert Terms(policy=parse_policy(tomllib.loads(POLICY), "f")).denied_extras(claim.extras.asked) is None
