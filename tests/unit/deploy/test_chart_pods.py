"""What the values add to pods: environment, arguments, volumes, update strategies, annotations; and objects beside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nri_gpu.cli.main import VERBS, parse
from tests.support.chart import CLAIMS, COMPONENTS, CROWDED, EXTRAS, OBSERVING, VARIANTS, container, daemon_sets
from tests.support.helm import RefusedError, documents, render, values

NEWEST = kubernetes_validate.latest_version()
# Options that no value sets.
FREE = {"run": {"index"}, "guard": set(), "dra": set(), "observe": {"pod-resources", "containerd-state"}}
every_component = pytest.mark.parametrize("component", COMPONENTS)


def made(component: str, **extras: object) -> list[dict[str, Any]]:
    """What is rendered with these values in the component's table."""
    _, base, table = COMPONENTS[component]
    return documents(**(base | {table: base.get(table, {}) | extras} if table else base | extras))


def refused(component: str, **extras: object) -> str:
    """The sentence with which they are refused."""
    with pytest.raises(RefusedError) as caught:
        made(component, **extras)
    return str(caught.value).rpartition("): ")[2]


def templates(among: list[dict[str, Any]]) -> dict[str, Any]:
    """Component -> its pod's template."""
    made_of = [each for each in among if each["kind"] in ("DaemonSet", "Job")]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"] for each in made_of}


@cache
def spec(component: str) -> Any:  # noqa: ANN401 - parsed YAML
    return templates(made(component))[component]["spec"]


# --- environment, arguments, volumes ---------------------------------------------------------------------------------


@every_component
def test_extras_come_after_its_own_and_to_no_other_container(component: str) -> None:
    changed, before = made(component, **EXTRAS), templates(made(component))
    for each in changed:
        if each["kind"] == "DaemonSet":
            kubernetes_validate.validate(each, NEWEST, strict=True)
    after = templates(changed)
    mine, was = after[component]["spec"], before.pop(component)["spec"]
    for key, extra in (("env", "extraEnv"), ("args", "extraArgs"), ("volumeMounts", "extraVolumeMounts")):
        assert mine["containers"][0].pop(key) == was["containers"][0].pop(key) + EXTRAS[extra]
    assert mine.pop("volumes") == was.pop("volumes") + EXTRAS["extraVolumes"]
    assert mine == was  # the container that mounts for MPS among it
    del after[component]
    assert after == before  # the Job among them


@every_component
def test_no_argument_repeats_an_option_that_the_chart_or_a_value_sets(component: str) -> None:
    verb = COMPONENTS[component][0]
    (known,) = (each.options for each in VERBS if each.name == verb)
    options = {flag[2:] for flags, _ in known for flag in flags if flag.startswith("--")}
    for option in sorted(options - FREE[verb]):
        said = refused(component, extraArgs=[f"--{option}=1"])
        assert f"extraArgs: --{option}=1 repeats --{option}, " in said
        assert of_a_value(said)
    for option in FREE[verb]:
        args = templates(made(component, extraArgs=[f"--{option}=1"]))[component]["spec"]["containers"][0]["args"]
        assert vars(parse(*args))[option.replace("-", "_")] == "1"
    there = [variant for variant in (*VARIANTS, *OBSERVING) if component in daemon_sets(variant)]
    words = {word for variant in there for word in container(component, variant)["args"][1:]}
    passed = {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in words}
    assert passed
    assert passed <= options - FREE[verb]


def of_a_value(said: str) -> bool:
    """Whether the sentence names a value that there is, or says that there is none."""
    named = re.search(r"which a value sets: remove it, and set ([A-Za-z.]+)$", said)
    if named is None:
        return said.endswith("which is the chart's own: remove it")
    at: Any = values()
    for key in named[1].split("."):
        at = at[key]
    return True


@pytest.mark.parametrize(
    ("argument", "option"),
    [("--log=DEBUG", "log-level"), ("--no-k", "no-kubelet"), ("--no-dra", "no-dra"), ("--stat=/x", "state-dir")],
)
def test_nor_does_the_beginning_of_one(argument: str, option: str) -> None:
    assert f"extraArgs: {argument} repeats --{option}, " in refused("daemon", extraArgs=[argument])
    assert vars(parse("run", argument))  # as the program takes it


@every_component
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["NVIDIA_VISIBLE_DEVICES"], "extraEnv: NVIDIA_VISIBLE_DEVICES is the chart's own: remove it"),
        (["A", "NODE_NAME"], "extraEnv: NODE_NAME is the chart's own: remove it"),
        (["A", "A"], "extraEnv: A is given twice: remove one of them"),
    ],
)
def test_what_tells_the_pod_its_node_and_keeps_other_runtimes_away_stays(
    component: str, names: list[str], said: str
) -> None:
    assert refused(component, extraEnv=[{"name": name, "value": "all"} for name in names]).endswith(said)


def around(path: str) -> Iterator[str]:
    """Paths that cover a path, or a part of it."""
    yield from (path, f"{path}/", f"/{path}", f"{path}/below/it", f"/etc/..{path}", "/")
    yield from map(str, PurePosixPath(path).parents)
    if path.startswith("/var/run/"):
        yield path.removeprefix("/var")
    if path.startswith("/run/"):
        yield f"/var{path}"


@every_component
def test_a_mount_covers_none_of_its_own(component: str) -> None:
    own = sorted(each["mountPath"] for each in spec(component)["containers"][0]["volumeMounts"])
    assert len(own) >= 4
    # Each of them, and in every form the first below /run and the deepest one.
    in_run = [each for each in own if each.startswith(("/run/", "/var/run/"))][:1]
    deepest = max(own, key=lambda each: each.count("/"))
    for path in {*own, *(covering for each in (*in_run, deepest) for covering in around(each))}:
        said = refused(component, **mounted(path))
        assert re.search(
            rf"extraVolumeMounts: {re.escape(path)} covers /\S+ or a part of it, .*choose another path", said
        )


@pytest.mark.parametrize("component", ["guard", "dra"])
@pytest.mark.parametrize(
    "path",
    [
        "/usr",
        "/usr/bin",
        "/usr/lib/python3",
        "/lib64",
        "/opt",
        "/opt/nri-gpu/bin",
        "/usr/local",
        "/etc",
        "/run/termination-log",
        "/proc/1",
        "/sys",
        "/dev",
    ],
)
def test_a_mount_covers_no_part_of_the_program_nor_what_the_runtime_makes(component: str, path: str) -> None:
    assert f"extraVolumeMounts: {path} covers /" in refused(component, **mounted(path))


@every_component
@pytest.mark.parametrize("path", ["/tmp", "/etc/ssl/certs", "/usr/share/zoneinfo", "/run/nri-gpu-extra", "/home"])
def test_a_mount_elsewhere_is_made(component: str, path: str) -> None:
    (container,) = templates(made(component, **mounted(path)))[component]["spec"]["containers"]
    assert container["volumeMounts"][-1] == {"name": "extra", "mountPath": path}


def mounted(*paths: str, volume: str = "extra") -> dict[str, Any]:
    mounts = [{"name": volume, "mountPath": path} for path in paths]
    return {"extraVolumes": [{"name": "extra", "emptyDir": {}}], "extraVolumeMounts": mounts}


@every_component
def test_volumes_and_mounts_that_do_not_go_together_are_refused(component: str) -> None:
    table = COMPONENTS[component][2]
    before = f"{table}." if table else ""
    for name in (each["name"] for each in spec(component)["volumes"]):
        said = refused(component, extraVolumes=[{"name": name, "emptyDir": {}}])
        assert said.startswith(f"{before}extraVolumes: there is a volume {name} already")
        # Nor is one of its own mounted elsewhere, such as a folder that it may only read.
        said = refused(component, **mounted("/tmp", volume=name))
        assert said.startswith(f"{before}extraVolumeMounts: {before}extraVolumes has no volume {name}")
    twice = refused(component, **mounted("/tmp", "/tmp/"))
    assert twice.startswith(f"{before}extraVolumeMounts: /tmp is given twice")


@every_component
@pytest.mark.parametrize(
    ("extras", "at"),
    [
        ({"extraEnv": [{"name": "A", "value": 8080}]}, "/extraEnv/0/value': got number, want string"),
        ({"extraEnv": [{"name": "A=B"}]}, "/extraEnv/0/name'"),
        ({"extraEnv": [{"name": "A", "value": "", "valueFrom": {}}]}, "extraEnv: A has value and valueFrom"),
        ({"extraArgs": ["-o"]}, "/extraArgs/0'"),
        ({"extraArgs": ["--index", "10"]}, "/extraArgs/1'"),
        ({"extraVolumes": [{"name": "A b"}]}, "/extraVolumes/0/name'"),
        ({"extraVolumeMounts": [{"name": "a", "mountPath": "tmp"}]}, "/extraVolumeMounts/0/mountPath'"),
        (
            {"extraVolumeMounts": [{"name": "a", "mountPath": "/tmp", "readonly": True}]},
            "/extraVolumeMounts/0': additional properties 'readonly' not allowed",
        ),
        (  # which only a privileged container may have
            {"extraVolumeMounts": [{"name": "a", "mountPath": "/tmp", "mountPropagation": "Bidirectional"}]},
            "/extraVolumeMounts/0/mountPropagation'",
        ),
        (
            {"extraVolumeMounts": [{"name": "a", "mountPath": "/tmp", "subPath": "a", "subPathExpr": "b"}]},
            "/extraVolumeMounts/0'",
        ),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_with_its_place(
    component: str, extras: dict[str, Any], at: str
) -> None:
    with pytest.raises(RefusedError, match=re.escape(at)):
        made(component, **extras)


# --- updates ---------------------------------------------------------------------------------------------------------

SURGE, ONE_AWAY = {"maxSurge": 1, "maxUnavailable": 0}, {"maxUnavailable": 1}


@pytest.mark.parametrize(
    ("given", "rolling"),
    [
        ({}, None),
        (None, None),
        ({"type": "RollingUpdate"}, None),
        ({"rollingUpdate": {}}, None),
        ({"rollingUpdate": {"maxUnavailable": "10%"}}, {"maxUnavailable": "10%"}),
        ({"rollingUpdate": {"maxSurge": 2}}, {"maxSurge": 2, "maxUnavailable": 0}),
        ({"rollingUpdate": {"maxSurge": 0}}, {"maxSurge": 0}),
        ({"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 3}}, {"maxSurge": 0, "maxUnavailable": 3}),
        ({"type": "OnDelete"}, "OnDelete"),
    ],
)
@pytest.mark.parametrize(("component", "default"), [("daemon", SURGE), ("dra", SURGE), ("observe", ONE_AWAY)])
def test_pods_are_replaced_as_the_values_say(component: str, default: object, given: object, rolling: object) -> None:
    sets = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each
        for each in made(component, updateStrategy=given)
        if each["kind"] == "DaemonSet"
    }
    wanted = {"type": "RollingUpdate", "rollingUpdate": rolling or default}
    assert sets[component]["spec"]["updateStrategy"] == (wanted if rolling != "OnDelete" else {"type": rolling})
    for other in sets.keys() - {component}:
        assert sets[other]["spec"]["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": SURGE}


@pytest.mark.parametrize("component", ["daemon", "dra", "observe"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "OnDelete", "rollingUpdate": {"maxSurge": 1}}, "type OnDelete has no rollingUpdate"),
        *(({"rollingUpdate": {"maxSurge": 1, "maxUnavailable": each}}, "are both above 0") for each in (1, "1%")),
        *(({"rollingUpdate": {"maxSurge": each, "maxUnavailable": 0}}, "are both 0") for each in (0, "0%")),
        ({"rollingUpdate": {"maxUnavailable": "0%"}}, "are both 0"),
    ],
)
def test_what_kubernetes_would_not_replace_by_is_refused(component: str, given: dict[str, Any], said: str) -> None:
    assert said in refused(component, updateStrategy=given)


# --- annotations and keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [["tolerate-missing.gpu.nri.io"], ["a", "example.com/b", "a"], []], ids=str)
def test_every_pod_may_be_created_where_plugins_are_required(keys: list[str]) -> None:
    seen = set()
    for _, base, _ in COMPONENTS.values():
        given = {"policy": "[limits]\n", **base, "tolerateMissingKeys": keys}
        for component, template in templates(documents(**given)).items():
            annotations = template["metadata"].get("annotations", {})
            assert {key: value for key, value in annotations.items() if "kubectl" not in key} == dict.fromkeys(
                keys, "true"
            )
            seen.add(component)
    assert seen >= {*COMPONENTS, "check"}


def test_no_annotation_of_ones_own_takes_that_back_nor_asks_for_a_gpu() -> None:
    keys: dict[str, Any] = {"tolerateMissingKeys": ["example.com/a"]}
    with pytest.raises(RefusedError, match=r"podAnnotations: the chart sets example\.com/a itself, to true"):
        render(**keys, podAnnotations={"example.com/a": "false"})
    assert render(**keys, podAnnotations={"example.com/a": "true"}) == render(**keys)
    for key in ("gpu.nri.io", "gpu.nri.io/pod"):
        with pytest.raises(RefusedError, match="/tolerateMissingKeys/0'"):
            render(tolerateMissingKeys=[key])


def test_the_job_has_of_all_that_is_for_pods_what_lets_it_start() -> None:
    taints = [{"key": "dedicated", "operator": "Exists"}]
    given = {**CROWDED["guard"], "tolerations": taints, "nodeSelector": {"gpus": "yes"}}
    template = templates(documents(None, **given))["check"]
    assert template["metadata"]["annotations"] == {"a": "true"}
    assert "team" not in template["metadata"]["labels"]
    assert template["spec"]["tolerations"] == taints
    assert template["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}  # before there is a node with GPUs
    assert "affinity" not in template["spec"]


def test_no_priority_is_a_priority_too() -> None:
    for name in ("", None):
        for template in templates(documents(**CLAIMS, priorityClassName=name)).values():
            assert "priorityClassName" not in template["spec"]
    assert {each["spec"]["priorityClassName"] for each in templates(documents(**CLAIMS)).values()} == {
        "system-node-critical"
    }


class OnceLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # chosen at run time
    """A loader that refuses a table with a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [each.value for each, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        table: dict[Any, Any] = super().construct_mapping(node, deep)
        return table


EVERY = {**VARIANTS, **OBSERVING, **CROWDED}


@pytest.mark.parametrize("variant", EVERY)
def test_no_key_is_rendered_twice(variant: str) -> None:
    for text in render(**EVERY[variant]).values():
        assert list(yaml.load_all(text, OnceLoader))


# --- objects beside --------------------------------------------------------------------------------------------------

OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": '{{ include "nri-gpu.fullname" . }}-a'}}
TEXT = """
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Release.Name }}-b
data:
  text: |
    ---
    kept
---
{{- if .Values.metrics.enabled }}
apiVersion: v1
kind: Secret
metadata: {name: c}
{{- end }}
"""


@pytest.mark.parametrize("mode", ["", "observe"])
def test_objects_of_ones_own_are_installed_in_every_mode(mode: str) -> None:
    given: dict[str, Any] = {"mode": mode, "extraObjects": [OBJECT, TEXT]}
    without, plain = documents(mode=mode), documents(**given)
    added = [each for each in plain if each not in without]
    assert [each["metadata"]["name"] for each in added] == ["nri-gpu-a", "nri-gpu-b"]
    assert added[1]["data"]["text"] == "---\nkept\n"
    measured = documents(**given, metrics={"enabled": True})
    assert [each["metadata"]["name"] for each in measured if each["kind"] == "Secret"] == ["c"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metadata": {"name": "a"}}, "extraObjects[1] lacks apiVersion or kind: give it both"),
        ({"kind": "Secret"}, "extraObjects[1] lacks apiVersion or kind"),
        ({}, "extraObjects[1] lacks apiVersion or kind"),
        (f"{TEXT}---\nkind: Secret", "extraObjects[1] lacks apiVersion or kind"),
        ("- a", "extraObjects[1] is no table in YAML: "),
        ("a: [", "extraObjects[1] is no table in YAML: "),
    ],
    ids=str,
)
def test_what_is_no_object_is_refused_before_anything_is_installed(given: object, said: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(said)):
        render(extraObjects=[OBJECT, given])
