"""Every example of docs/requests.md is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.names import BASE_KEY, CONTAINER_PREFIX, GRANT_KEY, KUBELET_KEY, POD_KEY
from nri_gpu.request.annotation import CLAUSES, WORDS, parse_claim, select_annotation

TEXT = (Path(__file__).parents[3] / "docs" / "requests.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
VALUES = [line for kind, body in BLOCKS if not kind for line in body.splitlines()]
MANIFESTS = [body for kind, body in BLOCKS if kind == "yaml"]
TRANSCRIPTS = [body.strip() for kind, body in BLOCKS if kind == "text"]
# Rows of the table of what not to write: | `bad` | trouble | `good` |
INSTEAD = re.findall(r"^\| `([^`]+)` \| [^|`]*(?:`[^`]+`[^|`]*)?\| (?:`([^`]+)` )?\|$", TEXT.split("## When")[1], re.M)


def test_there_are_examples() -> None:
    assert len(VALUES) > 12
    assert len(MANIFESTS) == 2
    assert len(INSTEAD) == 8


def test_it_has_each_key_and_each_clause() -> None:
    shown = set(re.findall(r"`([^`]+)`", "".join(line.split("|")[1] for line in TEXT.splitlines() if line[:1] == "|")))
    assert shown >= {f"{CONTAINER_PREFIX}<name>", POD_KEY, BASE_KEY, GRANT_KEY, f"{KUBELET_KEY}.<resource>", *WORDS}
    assert {re.split("[=>]", each)[0] for each in shown} >= CLAUSES.keys()


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_understood(value: str) -> None:
    parse_claim("gpu.nri.io", value)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_s_annotations_are_understood(manifest: str) -> None:
    annotations: dict[str, str] = yaml.safe_load(manifest)["metadata"]["annotations"]
    for key, value in annotations.items():
        chosen = select_annotation(annotations, {}, key.rpartition("container.")[2] if "container." in key else "main")
        assert chosen == (key, value)
        parse_claim(key, value)


@pytest.mark.parametrize(("bad", "good"), INSTEAD)
def test_what_not_to_write_and_what_instead(bad: str, good: str) -> None:
    with pytest.raises(RequestError):
        parse_claim("gpu.nri.io", bad)
    if good:
        parse_claim("gpu.nri.io", good)


def test_the_refusal_shown_is_the_real_one() -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim("gpu.nri.io/pod", "1;mdoe=shared")
    # As decide() words it.
    assert [str(Reason(Code.BAD_REQUEST, f"{caught.value}."))] == TRANSCRIPTS
