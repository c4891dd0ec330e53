"""The chart as another chart's dependency, two levels deep, by Helm 3, by Helm 4 and by its package."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import HarnessError
from tests.support.helm import CHART, IMAGE, LACKING, PROGRAMS, Helm, parsed

Render = Callable[[Path, Mapping[str, Any]], list[dict[str, Any]]]
OWN = f"file://{CHART}"
IMAGES = {"image": {"repository": IMAGE}}
TAG = "helm.sh/chart"  # has the alias in it


def write_chart(folder: Path, *dependencies: Mapping[str, str]) -> Path:
    """A chart of nothing but these."""
    folder.mkdir(exist_ok=True)
    described = {"apiVersion": "v2", "name": folder.name, "version": "1.0.0", "dependencies": dependencies}
    (folder / "Chart.yaml").write_text(json.dumps(described))
    return folder


def by_program(name: str, folder: Path) -> Render:
    helm = Helm(name, folder)

    def render(chart: Path, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        for each in sorted(folder.glob("*/Chart.yaml"), reverse=True):  # the parent before who has it
            helm("dependency", "update", each.parent)
        (folder / "values.yaml").write_text(json.dumps(values))
        told = (f"--values={folder}/values.yaml", "--namespace=gpus", helm.kube_version)
        return parsed(helm("template", "release", chart, *told))

    return render


def by_package(folder: Path) -> Render:
    from helm_python import Chart, HelmError, dependency_update

    def render(chart: Path, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        for each in sorted(folder.glob("*/Chart.yaml"), reverse=True):
            dependency_update(each.parent)
        try:
            texts = Chart.load(chart).render(dict(values), name="release", namespace="gpus")
        except HelmError as fault:
            raise HarnessError(str(fault)) from fault
        found = [each for name, text in texts.items() if name.endswith(".yaml") for each in parsed(text)]
        return [each for each in found if each]

    return render


@pytest.fixture(params=[*PROGRAMS, pytest.param("package", marks=pytest.mark.skipif(bool(LACKING), reason=LACKING))])
def render(request: pytest.FixtureRequest, tmp_path: Path) -> Render:
    return by_package(tmp_path) if request.param == "package" else by_program(request.param, tmp_path)


@pytest.fixture
def grandparent(tmp_path: Path) -> Path:
    """A chart whose dependency has ours twice, once under another name."""
    each = {"name": "nri-gpu", "version": "*", "repository": OWN}
    write_chart(
        tmp_path / "parent",
        {**each, "condition": "nri-gpu.enabled"},
        {**each, "condition": "gpus.enabled", "alias": "gpus"},
    )
    return write_chart(
        tmp_path / "grandparent", {"name": "parent", "version": "1.0.0", "repository": f"file://{tmp_path}/parent"}
    )


def sorted_by_name(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the label that names the dependency."""
    for each in made:
        each["metadata"]["labels"].pop(TAG)
    return sorted(made, key=lambda each: (each["kind"], each["metadata"]["name"]))


def names(made: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((each["kind"], each["metadata"]["name"]) for each in made)


GLOBAL = {"imageRegistry": "mirror.example.com", "imagePullSecrets": ["registry"], "storageClass": "fast"}


@pytest.mark.parametrize("name", ["nri-gpu", "gpus"])
@pytest.mark.parametrize("mode", ["", "observe"])
def test_it_is_the_same_under_two_charts_and_under_another_name(
    render: Render, grandparent: Path, name: str, mode: str
) -> None:
    own = {**IMAGES, "mode": mode, "policy": "[limits]\n", "metrics": {"enabled": True}}
    alone = sorted_by_name(render(CHART, {**own, "global": GLOBAL}))
    parent = {"nri-gpu": {"enabled": False}, "gpus": {"enabled": False}} | {name: {"enabled": True, **own}}
    made = render(grandparent, {"parent": parent, "global": GLOBAL})
    assert {each["metadata"]["labels"][TAG].rpartition("-")[0] for each in made} == {name}
    assert sorted_by_name(made) == alone
    assert "mirror.example.com/nri-gpu:" in json.dumps(alone)
    both_off = {"nri-gpu": {"enabled": False}, "gpus": {"enabled": False}}
    assert render(grandparent, {"parent": both_off}) == []


def test_twice_in_one_release_full_names_tell_them_apart(render: Render, grandparent: Path) -> None:
    one = render(grandparent, {"parent": {"nri-gpu": IMAGES, "gpus": {"enabled": False}}})
    both = render(grandparent, {"parent": {"nri-gpu": IMAGES, "gpus": {**IMAGES, "fullnameOverride": "other"}}})
    every = names(both)
    assert len(every) == len(set(every)) == 2 * len(one)
    sets = [each["spec"] for each in both if each["kind"] == "DaemonSet"]
    for each in sets:
        chosen = each["selector"]["matchLabels"].items()
        assert [other for other in sets if chosen <= other["template"]["metadata"]["labels"].items()] == [each]


def test_what_a_parent_sets_that_is_no_value_is_refused_by_its_name(render: Render, grandparent: Path) -> None:
    with pytest.raises(HarnessError, match=r"(?m)^gpus:\n- at '': additional properties 'mispelt' not allowed"):
        render(grandparent, {"parent": {"gpus": {**IMAGES, "mispelt": 1}, "nri-gpu": {"enabled": False}}})


def test_a_parents_globals_stay_as_it_sets_them(render: Render, tmp_path: Path) -> None:
    """Helm keeps a null in them, which a chart beside ours may go by."""
    parent = write_chart(tmp_path / "parent", {"name": "nri-gpu", "version": "*", "repository": OWN})
    (parent / "templates").mkdir()
    shown = "{kind: ConfigMap, metadata: {name: shown}, data: {{ toJson .Values.global }}}"
    (parent / "templates" / "shown.yaml").write_text(shown)
    made = render(parent, {"nri-gpu": IMAGES, "global": {"storage": {"class": {"name": None, "fast": True}}}})
    (found,) = (each["data"] for each in made if each["metadata"]["name"] == "shown")
    assert found == {"storage": {"class": {"name": None, "fast": True}}}


def test_what_it_defines_is_no_other_charts() -> None:
    """All charts of a release have their named templates together."""
    texts = [path.read_text() for path in (CHART / "templates").iterdir()]
    defined = [name for text in texts for name in re.findall(r'{{-? *define "([^"]+)"', text)]
    assert defined
    assert [name for name in defined if not name.startswith("nri-gpu.")] == []
    assert len(defined) == len(set(defined))
