"""The chart with values of its version 0.1.0: what that lacked, as --reuse-values has it, and names that are old."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.chart import VARIANTS
from tests.support.helm import CHART, RefusedError, documents, render
from tests.support.released import BEFORE_CORDONS, unpacked
from tools.chart_values import defaults, leaves, old_names, schema

BEFORE: Final = Path(__file__).parents[2] / "fixtures" / "chart" / "values-0.1.0.yaml"
HELPERS: Final = (CHART / "templates" / "_helpers.tpl").read_text()
Values = dict[str, Any]


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with the older one's defaults instead of its own: so --reuse-values renders it."""
    folder = tmp_path_factory.mktemp("reused") / "nri-gpu"
    shutil.copytree(CHART, folder)
    shutil.copyfile(BEFORE, folder / "values.yaml")
    return folder


def by_name(made: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def nested(flat: Mapping[str, object]) -> Values:
    """Tables of values by their paths."""
    made: Values = {}
    for path, value in flat.items():
        *tables, key = path.split(".")
        below = made
        for table in tables:
            below = below.setdefault(table, {})
        below[key] = value
    return made


# --- what the older chart lacked -------------------------------------------------------------------------------------


def test_the_older_charts_defaults_are_those_of_git() -> None:
    there = unpacked(BEFORE_CORDONS) / "deploy" / "helm" / "nri-gpu" / "values.yaml"
    assert yaml.safe_load(BEFORE.read_text()) == yaml.safe_load(there.read_text())


def lacking(old: Mapping[str, Any], new: Mapping[str, Any]) -> Values:
    """What of `new` has no key in `old`."""
    found: Values = {}
    for key, value in new.items():
        if key not in old:
            found[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict) and (below := lacking(old[key], value)):
            found[key] = below
    return found


def added() -> Values:
    (text,) = re.findall(r'define "nri-gpu.added" -}}\n(.*?){{- end', HELPERS, re.DOTALL)
    found: Values = yaml.safe_load(text)
    return found


def test_each_value_that_it_lacked_has_its_default_in_the_templates() -> None:
    assert added() == lacking(yaml.safe_load(BEFORE.read_text()), defaults())


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_values_make_what_the_defaults_make(reused: Path, variant: str) -> None:
    assert by_name(documents(None, reused, **VARIANTS[variant])) == by_name(documents(**VARIANTS[variant]))


EXTRA: Final[Values] = {
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraArgs": ["--example=yes"],
    "extraVolumes": [{"name": "added", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "added", "mountPath": "/added"}],
}
ACCOUNT: Final[Values] = {"create": False, "name": "gpus", "annotations": {"example.com/a": "b"}}
ON_DELETE: Final = {"type": "OnDelete"}
# Path of each value that was added, and one that is not its default.
OTHERS: Final[Mapping[str, object]] = {
    "mode": "observe",
    "nameOverride": "gpus",
    "fullnameOverride": "gpus",
    "namespaceOverride": "gpus",
    "commonLabels": {"team": "gpu"},
    "global.imageRegistry": "registry.example.com",
    "global.imagePullSecrets": ["all"],
    "image.registry": "registry.example.com",
    "image.digest": f"sha256:{'0' * 64}",
    "imagePullSecrets": [{"name": "own"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "added"}}],
    "tolerateMissingKeys": [],
    "rbac.create": False,
    "paths.remembered": "",
    "rules.enabled": True,
    "rules.runbookUrl": "https://example.com/messages",
    "dashboards.enabled": True,
    "pluginName": "gpus",
    "requirePlugin.enabled": True,
    "requirePlugin.namespaceSelector": {"matchLabels": {"team": "gpu"}},
    "metrics.annotations": False,
    "metrics.serviceMonitor.enabled": True,
    "metrics.serviceMonitor.interval": "30s",
    "metrics.serviceMonitor.scrapeTimeout": "10s",
    "metrics.serviceMonitor.labels": {"release": "prometheus"},
    "metrics.serviceMonitor.relabelings": [{"targetLabel": "a", "replacement": "b"}],
    "metrics.serviceMonitor.metricRelabelings": [{"targetLabel": "a", "replacement": "b"}],
    "observe.nvml": True,
    "observe.libraries": "lib64",
    "observe.runtimes": ["docker"],
    "observe.priorityClassName": "low",
    "observe.resources.requests": {"cpu": "1"},
    "observe.resources.limits": {"cpu": "2"},
    **{f"{table}updateStrategy": ON_DELETE for table in ("", "dra.", "observe.")},
    **{f"{table}serviceAccount.{key}": value for table in ("", "dra.") for key, value in ACCOUNT.items()},
    **{f"{table}{key}": value for table in ("", "guard.", "dra.", "observe.") for key, value in EXTRA.items()},
}
# Beginning of a path, and what has to be set for it to have a meaning.
BESIDE: Final[Mapping[str, Mapping[str, object]]] = {
    "mode": {"kubelet.enabled": "auto"},
    "observe.": {"kubelet.enabled": "auto", "mode": "observe"},
    "observe.libraries": {"observe.nvml": True},
    "dra.": {"kubelet.enabled": False, "dra.enabled": True},
    "rbac.": {"kubelet.enabled": False, "dra.enabled": True},
    "metrics.": {"metrics.enabled": True},
    "metrics.serviceMonitor.": {"metrics.serviceMonitor.enabled": True},
    "metrics.serviceMonitor.enabled": {"metrics.serviceMonitor.enabled": False},
    "rules.": {"metrics.enabled": True, "rules.enabled": True},
    "rules.enabled": {"rules.enabled": False},
    "requirePlugin.namespaceSelector": {"requirePlugin.enabled": True},
    "dashboards.": {"metrics.enabled": True},
    **{
        f"{table}extraVolumeMounts": {f"{table}extraVolumes": EXTRA["extraVolumes"]}
        for table in ("", "guard.", "dra.", "observe.")
    },
}


def test_each_value_that_it_lacked_is_tried_below() -> None:
    assert set(OTHERS) == {path for path, _ in leaves(added(), schema())}


@pytest.mark.parametrize("path", OTHERS)
def test_each_value_that_it_lacked_does_the_same_on_top_of_its_values(reused: Path, path: str) -> None:
    beside = {key: value for begins, given in BESIDE.items() if path.startswith(begins) for key, value in given.items()}
    given = nested({**beside, path: OTHERS[path]})
    made = by_name(documents(**given))
    assert by_name(documents(None, reused, **given)) == made
    assert made != by_name(documents(**nested(beside)))  # else nothing would be tried


def test_its_device_plugin_is_refused_beside_an_observer_with_what_to_set(reused: Path) -> None:
    with pytest.raises(RefusedError, match=r"set kubelet\.enabled=auto \(true was an older chart's default"):
        render(None, reused, mode="observe")


# --- names that are old ----------------------------------------------------------------------------------------------

SURGE: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "20%", "maxUnavailable": 0}}
OBSERVER: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 3}}
# By old names, by new ones, and what has to be set for either to have a meaning.
RENAMED: Final[Mapping[str, tuple[Mapping[str, object], Mapping[str, object], Mapping[str, object]]]] = {
    "a monitor": (
        {"metrics.scrape": "serviceMonitor", "metrics.labels": {"release": "prometheus"}},
        {"metrics.serviceMonitor.enabled": True, "metrics.serviceMonitor.labels": {"release": "prometheus"}},
        {"metrics.enabled": True},
    ),
    "nobody": ({"metrics.scrape": "none"}, {"metrics.annotations": False}, {"metrics.enabled": True}),
    "secrets": ({"image.pullSecrets": [{"name": "own"}]}, {"imagePullSecrets": [{"name": "own"}]}, {}),
    "surge": (
        {"maxSurge": "20%"},
        {"updateStrategy": SURGE, "dra.updateStrategy": SURGE},
        {"kubelet.enabled": False, "dra.enabled": True},
    ),
    "surge of observers": ({"maxSurge": 3}, {"observe.updateStrategy": OBSERVER}, {"mode": "observe"}),
}


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_does_what_the_new_one_does_also_beside_it(name: str) -> None:
    old, new, beside = RENAMED[name]
    made = documents(**nested({**beside, **new}))
    assert documents(**nested({**beside, **old})) == documents(**nested({**beside, **old, **new})) == made
    assert made != documents(**nested(beside))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"metrics.scrape": "none"}, {"metrics.serviceMonitor.enabled": True}),
        ({"metrics.labels": {"a": "b"}}, {"metrics.serviceMonitor.labels": {"a": "c"}}),
        ({"image.pullSecrets": [{"name": "a"}]}, {"imagePullSecrets": ["b"]}),
        *(({"maxSurge": 2}, {f"{table}updateStrategy": ON_DELETE}) for table in ("", "dra.", "observe.")),
    ],
    ids=str,
)
def test_an_old_name_that_contradicts_the_new_one_is_refused_until_it_is_removed(
    reused: Path, old: Mapping[str, object], new: Mapping[str, object]
) -> None:
    (name,), (instead,) = old, new
    said = rf"{name} is the old name of {instead}, and both are set and differ: remove {name} \(--set {name}=null"
    given = {"metrics.enabled": True, **new}
    for folder in (CHART, reused):
        with pytest.raises(RefusedError, match=said):
            render(None, folder, **nested({**given, **old}))
        assert documents(None, folder, **nested({**given, name: None})) == documents(**nested(given))


def test_an_old_name_without_a_meaning_is_no_fault() -> None:
    assert documents(metrics={"scrape": "serviceMonitor", "labels": {"a": "b"}}) == documents()


def test_an_old_name_whose_release_is_over_is_answered_with_the_new_one() -> None:
    with pytest.raises(RefusedError, match=r"stray\.criDir is the old name of health\.criDir: set health\.criDir"):
        render(stray={"criDir": "/run/containerd"})
    assert documents(stray={"criDir": ""}) == documents()


def test_the_schema_names_each_old_name_and_values_yaml_none() -> None:
    tried = {path for old, _, _ in RENAMED.values() for path in old} | {"stray.criDir"}
    assert {path for path, _ in old_names(schema())} == tried
    assert not tried & {path for path, _ in leaves(defaults(), schema())}
