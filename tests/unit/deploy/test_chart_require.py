"""Pods that require us, as the chart has it; tests/cluster has it on a real API server and a real containerd."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu_request import Nothing
from nri_gpu.request.annotation import parse_claim
from tests.support.chart import ELSEWHERE
from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm, RefusedError, documents
from tests.unit.request.samples import GOOD

ON: dict[str, Any] = {"requirePlugin": {"enabled": True}}
POLICY = '[plugin]\nname = "caf"\n'


def policies(**values: Any) -> dict[tuple[str, str], Any]:  # noqa: ANN401 - values of the chart
    """Kind and the name's end -> spec."""
    made = documents(ELSEWHERE, admission={"enabled": False}, **values)
    found = [each for each in made if "AdmissionPolicy" in each["kind"]]
    assert {each["metadata"]["name"].rpartition("-")[0] for each in found} <= {"elsewhere.other"}
    return {(each["kind"], each["metadata"]["name"].rpartition("-")[2]): each["spec"] for each in found}


def arguments(kind: str, **values: Any) -> list[str]:  # noqa: ANN401 - likewise
    (made,) = (
        each
        for each in documents(**values)
        if each["kind"] == kind and each["metadata"]["name"] in ("nri-gpu", "nri-gpu-check-policy")
    )
    found: list[str] = made["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_it_is_off_by_default() -> None:
    assert policies() == {}
    assert not [each for each in arguments("Job", policy=POLICY) if each.startswith("--require-plugin")]


def test_its_own_selector_and_never_that_of_admission() -> None:
    chosen = {"matchLabels": {"team": "gpu"}}
    found = policies(requirePlugin={"enabled": True, "namespaceSelector": chosen})
    assert set(found) == {
        ("MutatingAdmissionPolicy", "require"),
        ("MutatingAdmissionPolicyBinding", "require"),
        ("ValidatingAdmissionPolicy", "required"),
        ("ValidatingAdmissionPolicyBinding", "required"),
    }
    for (kind, end), spec in found.items():
        if kind.endswith("Binding"):
            assert spec["policyName"] == f"elsewhere.other-{end}"
            assert spec["matchResources"] == {"namespaceSelector": chosen}
        else:
            (rule,) = spec["matchConstraints"]["resourceRules"]
            assert (rule["operations"], rule["resources"]) == (["CREATE", "UPDATE"], ["pods"])
            assert spec["failurePolicy"] == ("Fail" if kind.startswith("Mutating") else "Ignore")
    assert found["MutatingAdmissionPolicy", "require"]["reinvocationPolicy"] == "IfNeeded"
    assert found["ValidatingAdmissionPolicyBinding", "required"]["validationActions"] == ["Warn"]
    everywhere = policies(requirePlugin={"enabled": True, "namespaceSelector": None})
    assert everywhere["MutatingAdmissionPolicyBinding", "require"]["matchResources"] == {"namespaceSelector": {}}


def test_names_and_labels_are_those_of_the_values() -> None:
    made = documents(namespaceOverride="a", fullnameOverride="b", commonLabels={"team": "c"}, **ON)
    found = [each["metadata"] for each in made if each["metadata"]["name"].startswith("a.b-require")]
    assert [each["labels"]["team"] for each in found] == ["c"] * 4


def test_none_is_what_the_grammar_calls_none() -> None:
    """All else asks, also what no node accepts: such a pod waits instead of starting without GPUs."""
    variables = policies(**ON)["MutatingAdmissionPolicy", "require"]["variables"]
    found = {each for variable in variables for each in re.findall(r"matches\(r'([^']*)'", variable["expression"])}
    (pattern,) = found
    none = re.compile(pattern.replace("$", r"\Z"))
    assert all(none.search(value) for value in ("none", "none;", " none\t; "))
    for value in (*(claim.text for claim in GOOD.values()), " none ;\t", "none;1", "nonesuch", "none\n", ";none", ""):
        try:
            asks = parse_claim("gpu.nri.io", value, given=True).wanted != Nothing()
        except RequestError:
            asks = True
        assert not (none.search(value) and asks), value


@pytest.mark.parametrize(("values", "name"), [({}, "nri-gpu"), ({"pluginName": "caf"}, "caf")])
def test_the_key_names_the_plugin(values: dict[str, str], name: str) -> None:
    spec = policies(**ON, **values)["MutatingAdmissionPolicy", "require"]
    (patch,) = spec["mutations"]
    (value,) = re.findall(r"value: '([^']*)'", patch["jsonPatch"]["expression"])
    assert json.loads(value) == yaml.safe_load(value) == [name]
    for kind, more in ("DaemonSet", {}), ("Job", {"policy": POLICY}):
        passed = [each for each in arguments(kind, **ON, **values, **more) if each.startswith("--plugin-name")]
        assert passed == ([f"--plugin-name={name}"] if values else [])
    assert f"--require-plugin={name}" in arguments("Job", policy=POLICY, **ON, **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"checkPolicy": False}, "set pluginName, or checkPolicy=true"),
        ({"mode": "observe"}, "set requirePlugin.enabled=false, or mode"),
        ({"pluginName": "a b"}, "/pluginName'"),
        ({"pluginName": "nri-gpu-guard"}, "pluginName is nri-gpu-guard, the guard's name"),
        (
            {"extraArgs": ["--plugin-name=a"]},
            "repeats --plugin-name, which a value sets: remove it, and set pluginName",
        ),
    ],
    ids=str,
)
def test_what_cannot_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(words)):
        documents(**ON, **values)


def test_a_name_without_a_check_is_enough() -> None:
    assert policies(**ON, checkPolicy=False, pluginName="caf")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_older_kubernetes(tmp_path: Path, name: str) -> None:
    """Its API server has no such policy; the programs say so before anything is installed."""
    helm = Helm(name, tmp_path)
    options = ("--namespace=nri-gpu", "--set=image.repository=a,requirePlugin.enabled=true")
    assert "kind: MutatingAdmissionPolicy\n" in helm("template", CHART, *options, "--kube-version=1.36.0-gke.1")
    with pytest.raises(HarnessError, match=re.escape("it needs 1.36, so set requirePlugin.enabled=false")):
        helm("template", CHART, *options, "--kube-version=1.35.9")


def test_notes_have_both_lines(tmp_path: Path) -> None:
    told = ("--namespace=nri-gpu", "--set=image.repository=a", "--dry-run=client")
    off, on = (
        Helm("helm4", tmp_path)("install", "nri-gpu", CHART, *told, f"--set=requirePlugin.enabled={enabled}")
        for enabled in ("false", "true")
    )
    for line in ("enable = true", "tolerate_missing_plugins_annotation"):
        assert (line in off, line in on) == (False, True)
