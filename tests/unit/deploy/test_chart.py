"""The Helm chart: Kubernetes takes what it renders, the programs what it passes, and it asks for no more than that."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import kubernetes_validate
import pytest
import yaml

from nri_gpu.cli.main import _parser
from nri_gpu.cli.run import _overrides
from nri_gpu.daemon.app import DRAIN_S
from nri_gpu.daemon.policy_file import PolicyText, build_policy
from nri_gpu.domain.mps import DEFAULT_MPS_DIR
from nri_gpu.policy.kubelet import Registration
from nri_gpu.policy.metrics import metrics_faults
from nri_gpu.policy.model import Policy
from nri_gpu.request.parse import select_annotation
from nri_gpu.simulation.topology import load_topology
from nri_gpu.system.succession import TAKES_OVER_S
from tests.support import builders as make
from tests.support.daemon import TOPOLOGIES
from tests.support.helm import CHART, RefusedError, Release, documents, render, values
from tests.support.manifests import FOLDER, SETS
from tests.support.prometheus import ALERTS
from tests.unit.policy.samples import SETTINGS

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# The oldest that Chart.yaml admits and the newest whose schemas there are.
VERSIONS = ("1.25", kubernetes_validate.latest_version())
ADMISSION = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
NEWER = {*ADMISSION, "DeviceClass"}  # than the oldest
RIGHTS = {"ClusterRole", "ClusterRoleBinding", "DeviceClass"}  # of the DRA driver: tests/unit/deploy/test_dra.py
OPERATORS = {"ServiceMonitor"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "annotations": {"kubelet": {"enabled": False}},
    "beside": {"kubelet": {"enabled": False, "podResources": True}},
    "all of it": {
        "policy": '[namespaces]\nallow = ["*"]\n',
        "kubelet": {"registration": "watcher", "root": "/data/kubelet"},
        "labels": {"enabled": True},
        "admission": {"action": "Deny", "namespaceSelector": {"matchLabels": {"team": "gpu"}}},
        "guard": {"criDir": "/run/containerd"},
        "image": {"tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "gpu"},
        "maxSurge": "10%",
    },
    "mps": {"policy": "[mps]\nenabled = true\n", "mps": {"enabled": True, "size": "8g"}},
    "stray": {"kubelet": {"enabled": False}, "stray": {"enabled": True, "criDir": "/run/containerd"}},
    "claims": {"kubelet": {"enabled": False}, "dra": {"enabled": True, "extendedResource": "nvidia.com/gpu"}},
    "metrics": {"metrics": {"enabled": True}},
    "scraped by the operator": {
        "metrics": {"enabled": True, "scrape": "serviceMonitor", "port": 9999, "labels": {"release": "prometheus"}},
    },
    "least of it": {
        "guard": {"enabled": False},
        "admission": {"enabled": False},
        "affinity": {"nodeAffinity": None},
        "tolerations": [],
        "nodeSelector": {"kubernetes.io/os": None},
        "resources": {"requests": None, "limits": None},
    },
}


def release(version: str, name: str = "other") -> Release:
    """On a cluster of that version: before 1.30 there is no policy of the kind that the chart has."""
    return Release(name, "elsewhere", *([frozenset()] if version == VERSIONS[0] else []))


@cache
def daemon_sets(variant: str = "defaults") -> dict[str, dict[str, Any]]:
    found = [each for each in documents(values(**VARIANTS[variant])) if each["kind"] == "DaemonSet"]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def pod(component: str, variant: str = "defaults") -> Any:  # noqa: ANN401 - parsed YAML
    return daemon_sets(variant)[component]["spec"]["template"]["spec"]


def container(component: str, variant: str = "defaults") -> Any:  # noqa: ANN401 - parsed YAML
    (only,) = pod(component, variant)["containers"]
    return only


def mount(component: str, variant: str = "defaults", **fields: str) -> Any:  # noqa: ANN401 - parsed YAML
    """The container's mount with this field."""
    (found,) = (each for each in container(component, variant)["volumeMounts"] if fields.items() <= each.items())
    return found


def arguments(component: str, variant: str = "defaults", probe: str = "") -> Namespace:
    """What our command line reads of the container's arguments, or of a probe's command."""
    chosen = container(component, variant)
    program, *rest = chosen[probe]["exec"]["command"] if probe else ["nri-gpu", *chosen["args"]]
    assert program == "nri-gpu"
    return _parser().parse_args(rest)


def host_paths(component: str, variant: str = "defaults") -> dict[str, str]:
    """Host path -> `ro` or `rw`."""
    paths = {
        each["name"]: each["hostPath"]["path"] for each in pod(component, variant)["volumes"] if "hostPath" in each
    }
    read_only = {each["name"]: each.get("readOnly") for each in container(component, variant)["volumeMounts"]}
    return {path: "ro" if read_only[name] else "rw" for name, path in paths.items()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_it(variant: str, version: str) -> None:
    given = values(**VARIANTS[variant])
    jsonschema.validate(given, SCHEMA)
    for document in documents(given, release(version)):
        if document["kind"] in OPERATORS:  # whose schemas are not Kubernetes' own
            continue
        if document["kind"] in NEWER and version == VERSIONS[0]:
            continue
        kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"].get("namespace", "elsewhere") == "elsewhere"
        assert re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", document["metadata"]["name"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_takes_each_file_as_it_is_applied(path: Path, version: str) -> None:
    found = list(yaml.safe_load_all(path.read_text()))
    kinds = ["Namespace", "ServiceAccount", "ConfigMap", *ADMISSION, "DaemonSet", "DaemonSet"]
    assert [each["kind"] for each in found][: len(kinds)] == kinds
    for document in found:
        if document["kind"] not in NEWER or version != VERSIONS[0]:
            kubernetes_validate.validate(document, version, strict=True)
    namespace, *others = (each for each in found if each["kind"] not in {*ADMISSION, *RIGHTS})
    assert {each["metadata"]["namespace"] for each in others} == {namespace["metadata"]["name"]}
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_chart_is_one_as_helm_takes_them() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"], chart["type"]) == ("v2", CHART.name, "application")
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])
    files = {path.relative_to(CHART).as_posix() for path in CHART.rglob("*") if path.is_file()}
    # No helpers, notes or dependencies: nothing that only Helm could read.
    assert {path for path in files if not re.fullmatch(r"templates/[a-z]+\.yaml", path)} == {
        "Chart.yaml",
        "values.schema.json",
        "values.yaml",
    }


# --- values ----------------------------------------------------------------------------------------------------------


def tables(schema: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all tables whose keys the schema names, the topmost first."""
    chosen = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" in chosen:
        yield at
        for key, below in chosen["properties"].items():
            yield from tables(below, (*at, key))


@pytest.mark.parametrize("path", list(tables(SCHEMA)), ids=".".join)
def test_a_misspelt_key_is_refused_at_every_level(path: tuple[str, ...]) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    table = given = values()
    for key in path:
        table = table[key]
    table["mispelt"] = {}
    with pytest.raises(jsonschema.ValidationError, match="mispelt"):
        jsonschema.validate(given, SCHEMA)


def test_every_table_of_the_values_is_one_of_those() -> None:
    free = {"affinity", "nodeSelector", "podAnnotations", "podLabels"}  # their keys are Kubernetes'
    found = {(key,) for key, value in values().items() if isinstance(value, dict) and key not in free}
    assert found | {(), ("guard", "resources"), ("dra", "resources")} == set(tables(SCHEMA))


@pytest.mark.parametrize(
    "wrong",
    [
        {"imagee": {}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"image": {"repository": "Upper Case"}},
        {"paths": {"nri": "run/nri"}},
        {"paths": {"nri": "/run/../etc"}},
        {"paths": {"stage": "/"}},
        {"paths": {"state": "/run/nri-gpu/"}},
        {"paths": {"nri": "/run/nri: x"}},
        {"guard": {"enabled": "yes"}},
        {"admission": {"action": "Audit"}},
        {"metrics": {"scrape": "push"}},
        {"metrics": {"port": 0}},
        {"metrics": {"address": "localhost"}},
        {"admission": {"resourcePrefix": "gpu"}},
        {"maxSurge": 0},
        {"maxSurge": "0%"},
        {"resources": {"limits": {"memory": "much"}}},
        {"nodeSelector": {"a": 1}},
        {"logLevel": "LOUD"},
        {"policy": {"namespaces": {}}},
        {"kubelet": {"registration": "both"}},
        {"kubelet": {"enabled": "false"}},
        {"dra": {"enabled": 1}},
        {"dra": {"driver": "gpu"}},
        {"dra": {"driver": "gpu.nri.io'"}},
        {"dra": {"extendedResource": "gpu"}},
        {"dra": {"resources": {"requests": {"nvidia.com/gpu": 1}}}},
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        {"guard": {"resources": {"requests": {"nvidia.com/gpu": 1}}}},
        {"podAnnotations": {"gpu.nri.io": "1"}},
        {"podAnnotations": {"gpu.nri.io/container.guard": "1"}},
        {"podAnnotations": {"tolerate-missing.gpu.nri.io": "false"}},
        {"podAnnotations": {"a": 1}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values(**wrong), SCHEMA)


def test_every_value_is_in_the_schema_and_used() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", templates))
    for path in leaves(values(), SCHEMA):
        assert any(path == each or path.startswith(f"{each}.") for each in used), path


def leaves(table: Mapping[str, Any], schema: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Paths of values, down to where the schema no longer names keys."""
    for key, value in table.items():
        described = schema["properties"][key]
        if "properties" in described:
            yield from leaves(value, described, f"{before}{key}.")
        else:
            yield before + key


def one(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (only,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return only


def policy_in(found: list[dict[str, Any]]) -> Policy:
    """As the daemon takes it up: the ConfigMap's, with what its arguments put over it."""
    (only,) = one(found, "DaemonSet", "nri-gpu")["spec"]["template"]["spec"]["containers"]
    text = one(found, "ConfigMap", "nri-gpu-policy")["data"]["policy.toml"]
    return build_policy(PolicyText("values.yaml", text), _overrides(_parser().parse_args(only["args"])))


def policy_of(variant: str) -> Policy:
    return policy_in(documents(values(**VARIANTS[variant])))


def test_by_default_the_kubelet_gives_every_gpu_and_annotations_none() -> None:
    policy = policy_of("defaults")
    assert policy.kubelet.enabled
    assert arguments("daemon").gpus is None  # nothing is simulated
    inventory = make.inventory((make.gpu(0), make.mig_gpu(1)))
    members = policy.pool.members(inventory)
    assert {members[unit.uuid].name for unit in inventory.units} == {policy.kubelet.pool}
    assert not any(pool.namespaces for pool in policy.pool.pools)


@pytest.mark.parametrize("file", sorted(TOPOLOGIES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_cluster_without_gpus_has_those_of_a_file(file: Path, tmp_path: Path) -> None:
    found = documents(values(simulation=file.read_text(), affinity={"nodeAffinity": None}))
    spec = one(found, "DaemonSet", "nri-gpu")["spec"]["template"]["spec"]
    (only,) = spec["containers"]
    folder = next(each["mountPath"] for each in only["volumeMounts"] if each["name"] == "policy")
    assert _parser().parse_args(only["args"]).gpus == f"{folder}/topology.toml"
    (tmp_path / "topology.toml").write_text(one(found, "ConfigMap", "nri-gpu-policy")["data"]["topology.toml"])
    assert load_topology(tmp_path / "topology.toml", wall=lambda: 1.0) == load_topology(file, wall=lambda: 1.0)
    assert not spec["affinity"]


def test_one_value_makes_it_annotations_alone() -> None:
    policy = policy_of("annotations")
    assert not policy.kubelet.enabled
    assert not policy.pool.pools
    assert policy.namespaces.allow == Policy.default().namespaces.allow


def test_the_values_decide_whether_the_kubelet_is_served_whatever_the_policy_says() -> None:
    said = '[kubelet]\nenabled = {}\nregistration = "{}"\n'
    for enabled, registration in ((True, "watcher"), (False, "register")):
        given = {
            "policy": said.format(str(not enabled).lower(), "register"),
            "kubelet": {"enabled": enabled, "registration": registration},
        }
        policy = policy_in(documents(values(**given)))
        assert (policy.kubelet.enabled, policy.kubelet.registration) == (enabled, Registration(registration))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kubelets_folders_are_where_the_daemon_looks(variant: str) -> None:
    settings = policy_of(variant).kubelet
    inside = {each["mountPath"] for each in container("daemon", variant)["volumeMounts"]}
    assert (settings.dir in inside) == (settings.cdi_dir in inside) == settings.enabled
    assert (settings.registry_dir in inside) == (settings.registration is Registration.WATCHER)


# --- what is started -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_programs_take_their_arguments(variant: str) -> None:
    assert arguments("daemon", variant).kubelet is policy_of(variant).kubelet.enabled
    for component in daemon_sets(variant).keys() - {"dra"}:  # it has no probes
        assert all(arguments(component, variant, probe) for probe in ("", "readinessProbe", "livenessProbe"))


@pytest.mark.parametrize("component", ["daemon", "guard"])
def test_the_policy_is_mounted_as_a_folder_because_a_file_alone_is_never_swapped(component: str) -> None:
    folder = mount(component, name="policy")
    assert "subPath" not in folder
    assert arguments(component).policy == f"{folder['mountPath']}/policy.toml"


# --- never a gap -----------------------------------------------------------------------------------------------------


def test_of_daemon_and_guard_the_next_is_there_before_the_last_goes() -> None:
    sets = daemon_sets()
    update = {name: each["spec"]["updateStrategy"]["rollingUpdate"] for name, each in sets.items()}
    assert update == {name: {"maxSurge": 1, "maxUnavailable": 0} for name in ("daemon", "guard")}
    # One ledger: the second of two waits, and counts as ready when it does.
    assert arguments("daemon").stand_by
    assert arguments("daemon", probe="readinessProbe").probe
    assert pod("daemon")["terminationGracePeriodSeconds"] > DRAIN_S + TAKES_OVER_S
    selectors = [each["spec"]["selector"]["matchLabels"] for each in sets.values()]
    assert selectors[0] != selectors[1]


def test_two_guards_of_a_surge_do_not_share_a_folder() -> None:
    name = mount("guard", mountPath=arguments("guard").run_dir)["name"]
    (volume,) = (each for each in pod("guard")["volumes"] if each["name"] == name)
    assert "emptyDir" in volume


# --- two releases, for a change-over node by node --------------------------------------------------------------------


def change_over() -> dict[str, Mapping[str, Any]]:
    """The values files of the documentation's migration, by their names."""
    page = (CHART.parents[2] / "docs" / "kubernetes-install.md").read_text()
    found = re.findall(r"```yaml\n# ([a-z]+)\.yaml: (.*?)```", page, flags=re.DOTALL)
    return {name: yaml.safe_load(f"# {text}") for name, text in found}


def test_the_documented_values_are_of_the_schema_and_their_policy_holds() -> None:
    found = change_over()
    assert set(found) == {"beside", "kubelet"}
    for changed in found.values():
        given = values(**changed)
        jsonschema.validate(given, SCHEMA)
        for version in VERSIONS:
            for document in documents(given, release(version)):
                kubernetes_validate.validate(document, version, strict=True)
        for document in documents(given):
            if document["kind"] == "ConfigMap":
                assert build_policy(PolicyText("values", document["data"]["policy.toml"]))


def test_two_releases_have_no_name_in_common_and_choose_none_of_each_others_pods() -> None:
    found = change_over()
    first = documents(values(**found["beside"]), Release("nri-gpu-beside"))
    second = documents(values(**found["kubelet"]), Release("nri-gpu"))
    names = [{(each["kind"], each["metadata"]["name"]) for each in release} for release in (first, second)]
    assert not names[0] & names[1]
    sets = [each["spec"] for release in (first, second) for each in release if each["kind"] == "DaemonSet"]
    for one in sets:
        chosen = one["selector"]["matchLabels"].items()
        assert [other for other in sets if chosen <= other["template"]["metadata"]["labels"].items()] == [one]
        # What a pod refers to is its own release's.
        spec = one["template"]["spec"]
        (config,) = (each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each)
        own = names[0] if ("ConfigMap", config) in names[0] else names[1]
        assert {("ServiceAccount", spec["serviceAccountName"]), ("ConfigMap", config)} <= own


def test_no_node_fits_both_releases_and_one_state_folder_hands_it_over() -> None:
    both = [values(**changed) for changed in change_over().values()]
    chosen = [each["nodeSelector"] for each in both]
    (key,) = {key for key in chosen[0] if chosen[0][key] != chosen[1].get(key)}
    assert {each[key] for each in chosen} == {"nvidia", "nri-gpu"}  # a label has one value
    for given in both:
        for each in documents(given):
            if each["kind"] == "DaemonSet":
                assert each["spec"]["template"]["spec"]["nodeSelector"] == given["nodeSelector"]
    assert len({each["paths"]["state"] for each in both}) == 1


# --- what the documentation says to set ------------------------------------------------------------------------------

PAGE = (CHART.parents[2] / "docs" / "kubernetes-install.md").read_text()


def values_said() -> list[tuple[str, Any]]:
    """Every `table.key: value` in code, wherever it stands."""
    found = re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z]+)+): ([^`]+)`", PAGE)
    return [(path, yaml.safe_load(value)) for path, value in found]


def test_every_value_that_it_names_is_one_and_renders() -> None:
    assert {path for path, _ in values_said()} >= {"kubelet.enabled", "paths.driverRoot", "guard.criDir"}
    for path, value in values_said():
        (table, key) = path.split(".")
        given = values(**{table: {key: value}})
        jsonschema.validate(given, SCHEMA)
        assert documents(given)
    for name in re.findall(r"`((?:kubelet|paths|guard|labels|admission)\.(?!yaml|conf)[a-zA-Z_]+)`", PAGE):
        section, key = name.split(".")
        assert key in values()[section] or name in SETTINGS, name


def test_every_policy_that_it_shows_holds() -> None:
    shown = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    shown += [
        f"[{section}]\n{setting}" for section, setting in re.findall(r"`\[([a-z]+)\] ([^`]+)`", PAGE) if "=" in setting
    ]
    assert len(shown) >= 5
    for text in shown:
        assert build_policy(PolicyText("page", text))


def test_every_path_of_the_cluster_that_it_names_is_the_charts() -> None:
    paths = {path for variant in VARIANTS for path in host_paths("daemon", variant)}
    for said in ("/var/run/nri", "/run/nri-gpu", "/var/lib/nri-gpu/drivers", "/var/lib/kubelet"):
        assert said in PAGE
        assert any(path == said or path.startswith(f"{said}/") for path in paths)
    for name in SETS:
        assert f"`{name}`" in PAGE


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_but_the_dra_driver_has_rights_at_the_api_server(variant: str) -> None:
    kinds = {each["kind"] for each in documents(values(**VARIANTS[variant]))}
    assert kinds <= {"ServiceAccount", "ConfigMap", "DaemonSet", "Service", *OPERATORS, *ADMISSION} | (
        RIGHTS if variant == "claims" else set()
    )
    for component in daemon_sets(variant):
        assert pod(component, variant)["automountServiceAccountToken"] is False


ALWAYS = {"/var/run/nri": "ro", "/run/nri-gpu": "rw", "/var/lib/nri-gpu/drivers": "rw", "/": "ro", "/dev": "rw"}
KUBELET = "/var/lib/kubelet"
SERVING = ALWAYS | {"/var/run/cdi": "rw", f"{KUBELET}/device-plugins": "rw"}
HOST_PATHS = dict.fromkeys(VARIANTS, SERVING | {f"{KUBELET}/pod-resources": "ro"}) | {
    "annotations": ALWAYS,
    "claims": ALWAYS,
    "beside": ALWAYS | {f"{KUBELET}/pod-resources": "ro"},
    "stray": ALWAYS | {f"{KUBELET}/pod-resources": "ro", "/run/containerd": "ro"},
    "all of it": SERVING
    | {
        "/data/kubelet/plugins_registry": "rw",
        "/data/kubelet/pod-resources": "ro",
        "/etc/kubernetes/node-feature-discovery/features.d": "rw",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_paths_are_those_that_are_needed(variant: str) -> None:
    assert host_paths("daemon", variant) == HOST_PATHS[variant]


def test_the_guards_host_paths_are_those_that_are_needed() -> None:
    assert host_paths("guard") == {"/var/run/nri": "ro", "/run/nri-gpu": "ro"}
    assert host_paths("guard", "all of it") == host_paths("guard") | {"/run/containerd": "ro"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_own_pods_ask_for_no_gpu(variant: str) -> None:
    for component, found in daemon_sets(variant).items():
        wanted = container(component, variant)["resources"]
        names = {name for amounts in wanted.values() for name in amounts}
        assert names <= {"cpu", "memory"}, component
        annotations = found["spec"]["template"]["metadata"].get("annotations", {})
        assert select_annotation(annotations, {}, component) is None


def test_its_own_pods_are_created_where_containerd_requires_the_plugins() -> None:
    """Else nothing could ever bring them: both sides of the drop-in's agreement."""
    drop_in = tomllib.loads((CHART.parents[2] / "config" / "containerd" / "required-plugins.toml").read_text())
    required = drop_in["plugins"]["io.containerd.nri.v1.nri"]["default_validator"]
    for found in daemon_sets("all of it").values():
        annotations = found["spec"]["template"]["metadata"]["annotations"]
        assert annotations[required["tolerate_missing_plugins_annotation"]] == "true"
        assert annotations["example.com/a"] == "b"
    policy = policy_of("defaults")
    assert required["enable"] is True
    assert required["required_plugins"] == [policy.plugin.name, policy.guard.name]


def test_the_default_namespace_is_refused_with_a_sentence() -> None:
    with pytest.raises(RefusedError, match=r"namespace of its own .*--create-namespace"):
        render(values(), Release(namespace="default"))


def test_the_kubelets_folder_has_to_be_there() -> None:
    """The kubelet makes it. Made by us it would be one that the kubelet knows nothing of."""
    types = {each["name"]: each["hostPath"].get("type") for each in pod("daemon", "all of it")["volumes"][1:]}
    assert {types[name] for name in ("device-plugins", "plugins-registry", "pod-resources")} == {"Directory"}


def test_the_guard_is_root_and_nothing_more() -> None:
    rights = container("guard", "all of it")["securityContext"]
    assert rights == {
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"]},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize("component", ["daemon", "guard"])
def test_of_the_hosts_namespaces_the_network_alone(component: str) -> None:
    spec = pod(component, "all of it")
    assert spec["hostNetwork"] is True
    assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
    assert container(component)["securityContext"]["readOnlyRootFilesystem"] is True


def test_mps_has_the_hosts_process_ids_and_a_mount_that_it_sees() -> None:
    spec = pod("daemon", "mps")
    assert spec["hostPID"] is True
    (init,) = spec["initContainers"]
    (made,) = init["volumeMounts"]
    assert made == {"name": "state", "mountPath": "/run/nri-gpu", "mountPropagation": "Bidirectional"}
    assert mount("daemon", "mps", name="state") == made | {"mountPropagation": "HostToContainer"}
    assert not {"hostPID", "initContainers"} & (pod("daemon").keys() | pod("guard", "mps").keys())


def test_metrics_are_served_and_found_as_the_values_say() -> None:
    """No port of the host is claimed, or the second daemon of an upgrade would wait for the first."""
    for variant, address in (("metrics", "0.0.0.0:9464"), ("scraped by the operator", "0.0.0.0:9999")):
        options = _overrides(arguments("daemon", variant))
        assert build_policy(PolicyText("policy.toml", ""), options).metrics.listen == address
        assert not list(metrics_faults(build_policy(PolicyText("policy.toml", ""), options).metrics))
        assert "ports" not in container("daemon", variant)
    assert "metrics.listen" not in _overrides(arguments("daemon"))
    found = pod_annotations("metrics")
    assert (found["prometheus.io/scrape"], found["prometheus.io/port"]) == ("true", "9464")
    assert not [each for each in pod_annotations("scraped by the operator") if "prometheus" in each]


def pod_annotations(variant: str) -> dict[str, str]:
    """Of the daemon's pods."""
    found: dict[str, str] = daemon_sets(variant)["daemon"]["spec"]["template"]["metadata"]["annotations"]
    return found


def test_the_operator_finds_the_daemons_alone() -> None:
    variant = "scraped by the operator"
    kinds = {each["kind"]: each for each in documents(values(**VARIANTS[variant]))}
    service, monitor = kinds["Service"], kinds["ServiceMonitor"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint], [port] = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert (endpoint["port"], endpoint["honorLabels"], port["port"]) == (port["name"], True, 9999)
    job = re.search(r'job=~"\.\*(.*)\.\*"', ALERTS.read_text())
    assert job
    assert job[1] == service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    selects = service["spec"]["selector"].items()
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in daemon_sets(variant).items()}
    assert [name for name, each in labels.items() if selects <= each.items()] == ["daemon"]
    assert not {"Service", "ServiceMonitor"} & {each["kind"] for each in documents(values())}


def test_the_stray_use_audit_sees_the_hosts_processes_and_two_sockets() -> None:
    spec = pod("daemon", "stray")
    assert spec["hostPID"] is True
    assert "initContainers" not in spec
    assert mount("daemon", "stray", name="cri") == {
        "name": "cri",
        "mountPath": "/run/containerd",
        "readOnly": True,
    }
    assert mount("daemon", "stray", name="pod-resources")["readOnly"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_mps_clients_write_is_mounted_once_and_bounded(tmp_path: Path) -> None:
    *program, place, options = pod("daemon", "mps")["initContainers"][0]["command"]
    assert place == DEFAULT_MPS_DIR
    base = tmp_path / "mps" / "clients"
    twice = 2 * shlex.join([*program, str(base), options]).join(["", "\n"])
    imports = "from pathlib import Path\nfrom nri_gpu.mps.folders import mount_fault"
    look = f"{imports}\nprint(mount_fault(Path({str(base)!r})))"
    script = f"set -e\n{twice}{shlex.join([sys.executable, '-c', look])}\ngrep {base} /proc/self/mounts"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True)
    fault, mounted = done.stdout.splitlines()
    assert fault == ""
    kind, rights = mounted.split()[2:4]
    assert kind == "tmpfs"
    assert {"nosuid", "nodev", "noexec", "mode=700", "nr_inodes=262144", f"size={8 << 20}k"} <= set(rights.split(","))


def test_nothing_is_left_in_the_hosts_dev() -> None:
    """The kubelet's file for last words is in /dev by default: the runtime would make it in the host's."""
    assert not container("daemon")["terminationMessagePath"].startswith("/dev")


def test_every_choice_of_rights_says_why() -> None:
    """A comment above each, in what is rendered as well."""
    for text in render(values()).values():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if re.match(r"\s*(?:privileged|runAsUser|readOnlyRootFilesystem|hostNetwork|capabilities):", line):
                above = next(each for each in reversed(lines[:number]) if "securityContext" not in each)
                excused = line.strip() in {"readOnlyRootFilesystem: true"} and "allowPrivilege" in above
                assert excused or above.strip().startswith("#"), line


def test_the_daemon_knows_what_the_runtime_calls_the_drivers_root() -> None:
    """Else a container would be given paths that are only ours."""
    args = arguments("daemon")
    assert args.driver_root == mount("daemon", name="driver-root")["mountPath"]
    assert args.driver_host_root == values()["paths"]["driverRoot"]
    assert args.driver_host_root in host_paths("daemon")
