"""Every example of docs/requirements.md is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nri_gpu.request.image_requirements import (
    BRANDS,
    CONDITION_MAX,
    CUDA_VERSION,
    DIFFERENT_MAX,
    REQUIRE_CUDA,
    TOTAL_MAX,
    TRUE,
    GpuFacts,
    RequirementFacts,
    unmet,
)

TEXT = (Path(__file__).parents[3] / "docs" / "requirements.md").read_text(encoding="utf-8")
NODE = RequirementFacts("560.35.03", "12.6", (GpuFacts((9, 0), "nvidia"),))
HOLDS, BAD = (TEXT.split(heading)[1].split("\n## ")[0] for heading in ("On a node with CUDA", "## What cannot"))
ROWS = re.findall(r"^\| `([^`]+)` \| (holds|does not hold)", HOLDS, re.MULTILINE)
INSTEAD = re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)` )?\|$", BAD, re.MULTILINE)


def test_there_are_examples() -> None:
    assert (len(ROWS), len(INSTEAD)) == (7, 7)


@pytest.mark.parametrize(("value", "said"), ROWS)
def test_it_holds_or_not(value: str, said: str) -> None:
    found = unmet({REQUIRE_CUDA: value}, NODE)
    assert (found is None) is (said == "holds")
    assert found is None or " needs " in found.clause


@pytest.mark.parametrize(("bad", "good"), INSTEAD)
def test_what_not_to_write_and_what_instead(bad: str, good: str) -> None:
    found = unmet({REQUIRE_CUDA: bad}, NODE)
    assert found is not None
    assert " cannot be understood: " in found.clause
    found = unmet({REQUIRE_CUDA: good}, NODE)
    assert found is None or " needs " in found.clause


def test_the_refusal_shown_is_the_real_one() -> None:
    found = unmet({REQUIRE_CUDA: "cuda>=13.0"}, NODE)
    assert found is not None
    assert re.findall(r"^```text\n(.*)\n```$", TEXT, re.MULTILINE) == [f"{found.clause}."]


def test_versions_of_legacy_images() -> None:
    listed = re.search(r"must be a version \((.*?)\)", TEXT)
    assert listed
    for version in re.findall("`(.*?)`", listed[1]):
        assert unmet({CUDA_VERSION: version}, NODE) is None
    found = unmet({CUDA_VERSION: "cu121"}, NODE)
    assert found is not None
    assert unmet({CUDA_VERSION: "cu121", REQUIRE_CUDA: "cuda>=12.1"}, NODE) is None


def test_words_and_limits_are_the_real_ones() -> None:
    listed = re.search(r"^- Brands: (.*?)\. From", TEXT, re.MULTILINE | re.DOTALL)
    assert listed
    assert tuple(re.findall("`(.*?)`", listed[1])) == BRANDS
    told = re.search(r"^\| `NVIDIA_DISABLE_REQUIRE` \| (.*?) turns", TEXT, re.MULTILINE)
    assert told
    assert set(re.findall("`(.*?)`", told[1])) == TRUE
    assert f"at most {CONDITION_MAX} characters" in TEXT
    assert f"together {TOTAL_MAX}." in TEXT
    assert f"At most {DIFFERENT_MAX} different conditions" in TEXT
