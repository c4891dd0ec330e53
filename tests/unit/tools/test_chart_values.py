"""What answers values of other charts, and the README that is made of the chart's values."""

from __future__ import annotations

import re

import pytest

from tests.support.helm import RefusedError, documents, render
from tools.chart_values import CHART, comments, defaults, foreign, leaves, readme, schema

# What users set of NVIDIA's device plugin, the GPU Operator and dcgm-exporter, and of most charts.
FOREIGN = (
    *("gfd", "nfd", "migStrategy", "failOnInitError", "deviceListStrategy", "deviceIDStrategy", "nvidiaDriverRoot"),
    *("gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "config", "compatWithCPUManager", "allowDefaultNamespace"),
    *("operator", "driver", "toolkit", "dcgmExporter", "mig", "migManager", "validator"),
    *("serviceMonitor", "arguments", "kubeletPath", "customMetrics"),
    *("devicePlugin", "runtimeClassName", "cdi", "podMonitor", "podSecurityContext", "securityContext"),
)
ANSWERS = {key: ours for keys in foreign().values() for key, ours in keys.items()}


@pytest.mark.parametrize("value", [{"enabled": True}, False, ""], ids=str)
@pytest.mark.parametrize("key", FOREIGN)
def test_a_value_of_another_chart_is_answered_with_ours(key: str, value: object) -> None:
    with pytest.raises(
        RefusedError, match=rf"{key} is a value of [^.]+\. Here: {re.escape(ANSWERS[key])}\."
    ) as refused:
        render(None, CHART, **{key: value})
    assert "Remove what is not of this chart." in str(refused.value)


def test_no_others_are_known_and_all_that_are_given_are_answered_at_once() -> None:
    refers = {"$ref": "#/definitions/foreign"}
    assert {key for key, each in schema()["properties"].items() if each == refers} == set(ANSWERS) == set(FOREIGN)
    with pytest.raises(RefusedError) as refused:
        render(gfd={"enabled": True}, toolkit={"enabled": False}, runtimeClassName="nvidia")
    assert str(refused.value).count(" Here: ") == 3
    assert documents(gfd=None) == documents()


def test_an_answer_names_values_that_are_there() -> None:
    there = {path for path, _ in leaves(defaults(), schema())} | {"metrics.serviceMonitor"}
    named = {word for ours in ANSWERS.values() for word in re.findall(r"\b[a-z]+\.[a-z][A-Za-z.]*[a-z]\b", ours)}
    assert named - {"metrics.md"} <= there
    assert "metrics.serviceMonitor" in named


def test_a_comment_is_that_above_its_key() -> None:
    text = "# Of the file.\n\n# First,\n# and more.\na:\n  # Of b.\n  b: 1\n  c: [2]\n\nd: 3\n"
    assert comments(text) == {"a": "First, and more.", "a.b": "Of b.", "a.c": "", "d": ""}


def test_the_page_has_each_value_with_its_default_and_comment() -> None:
    page = readme()
    for path, _ in leaves(defaults(), schema()):
        assert page.count(f"\n| `{path}` | ") == 1
    assert '| `resources.limits` | `{"memory": "1Gi"}` | Page cache of staged files counts' in page
    assert re.search(r"^\| \*\*`observe`\*\* \| \| Only with mode: observe\. \|$", page, re.MULTILINE)
    assert "| `maxSurge` | updateStrategy, dra.updateStrategy and observe.updateStrategy |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 4}
    assert (CHART / "README.md").read_text() == page
