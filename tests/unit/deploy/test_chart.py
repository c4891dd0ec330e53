"""The Helm chart: Kubernetes takes what it renders, the programs what it passes, and it asks for no more than that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import kubernetes_validate
import pytest

from nri_gpu import __version__
from nri_gpu.cli import _parser
from nri_gpu.settings import PolicyText, build_policy
from tests.support.helm import CHART, Release, documents, render, values
from tests.support.manifests import FILE, manifests

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# The oldest that Chart.yaml admits and the newest whose schemas there are.
VERSIONS = ("1.25", kubernetes_validate.latest_version())
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "all of it": {
        "kubelet": {"enabled": True},
        "labels": {"enabled": True},
        "guard": {"criDir": "/run/containerd"},
        "image": {"tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "gpu"},
        "maxUnavailable": "10%",
    },
    "least of it": {
        "guard": {"enabled": False},
        "affinity": {},
        "tolerations": [],
        "nodeSelector": {},
        "resources": {},
    },
}


def emptied(variant: str) -> dict[str, Any]:
    changed = values(**VARIANTS[variant])
    return changed | {key: value for key, value in VARIANTS[variant].items() if not value}


def daemon_sets(variant: str = "defaults") -> dict[str, dict[str, Any]]:
    found = [each for each in documents(emptied(variant)) if each["kind"] == "DaemonSet"]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def pod(component: str, variant: str = "defaults") -> dict[str, Any]:
    found: dict[str, Any] = daemon_sets(variant)[component]["spec"]["template"]["spec"]
    return found


def container(component: str, variant: str = "defaults") -> dict[str, Any]:
    (only,) = pod(component, variant)["containers"]
    found: dict[str, Any] = only
    return found


def host_paths(component: str, variant: str = "defaults") -> dict[str, str]:
    """Host path -> `ro` or `rw`."""
    spec = pod(component, variant)
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    mounts = {each["name"]: each for each in container(component, variant)["volumeMounts"]}
    return {path: "ro" if mounts[name].get("readOnly") else "rw" for name, path in paths.items()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_it(variant: str, version: str) -> None:
    for document in documents(emptied(variant), Release("other", "elsewhere")):
        kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"]["namespace"] == "elsewhere"


def test_the_schemas_would_say_what_is_wrong() -> None:
    (broken,) = (each for each in documents(values()) if each["kind"] == "ConfigMap")
    broken["dat"] = broken.pop("data")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_plain_manifests_are_what_it_renders() -> None:
    assert FILE.read_text() == manifests(), "run `make manifests`"


def test_its_version_is_the_programs() -> None:
    assert f'appVersion: "{__version__}"' in (CHART / "Chart.yaml").read_text()


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_are_of_their_schema(variant: str) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(emptied(variant), SCHEMA)


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
        {"maxUnavailable": 0},
        {"maxUnavailable": "0%"},
        {"resources": {"limits": {"memory": "much"}}},
        {"nodeSelector": {"a": 1}},
        {"logLevel": "LOUD"},
        {"policy": {"namespaces": {}}},
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


def test_the_policy_of_the_values_is_one() -> None:
    (config,) = (each for each in documents(values()) if each["kind"] == "ConfigMap")
    assert build_policy(PolicyText("values.yaml", config["data"]["policy.toml"]))


# --- what is started -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["defaults", "all of it"])
@pytest.mark.parametrize("component", ["daemon", "guard"])
def test_the_programs_take_their_arguments(component: str, variant: str) -> None:
    chosen = container(component, variant)
    # The kubelet's half is on its way: `run --kubelet`.
    arguments = [each for each in chosen["args"] if each != "--kubelet"]
    assert _parser().parse_args(arguments)
    for probe in ("readinessProbe", "livenessProbe"):
        program, *rest = chosen[probe]["exec"]["command"]
        assert program == "nri-gpu"
        assert _parser().parse_args(rest)


def test_probes_ask_where_the_programs_answer() -> None:
    daemon = _parser().parse_args(container("daemon")["args"])
    guard = _parser().parse_args(container("guard")["args"])
    for probe, alive in (("readinessProbe", False), ("livenessProbe", True)):
        asking = _parser().parse_args(container("daemon")[probe]["exec"]["command"][1:])
        assert (asking.state_dir, asking.guard, asking.alive) == (daemon.state_dir, None, alive)
        asking = _parser().parse_args(container("guard")[probe]["exec"]["command"][1:])
        assert (asking.guard, asking.alive) == (guard.run_dir, alive)
    assert (guard.state_dir, guard.socket, guard.policy) == (daemon.state_dir, daemon.socket, daemon.policy)


@pytest.mark.parametrize("component", ["daemon", "guard"])
def test_the_policy_is_mounted_as_a_folder_because_a_file_alone_is_never_swapped(component: str) -> None:
    (mount,) = (each for each in container(component)["volumeMounts"] if each["name"] == "policy")
    assert "subPath" not in mount
    assert _parser().parse_args(container(component)["args"]).policy == f"{mount['mountPath']}/policy.toml"


# --- never a gap -----------------------------------------------------------------------------------------------------


def test_an_upgrade_takes_the_daemon_alone_and_the_guard_never() -> None:
    sets = daemon_sets()
    update = {name: each["spec"]["updateStrategy"]["rollingUpdate"] for name, each in sets.items()}
    assert update["daemon"]["maxSurge"] == 0  # one ledger: the second of two would find the state folder taken
    assert update["guard"] == {"maxSurge": 1, "maxUnavailable": 0}
    selectors = [each["spec"]["selector"]["matchLabels"] for each in sets.values()]
    assert selectors[0] != selectors[1]


def test_two_guards_of_a_surge_do_not_share_a_folder() -> None:
    run_dir = _parser().parse_args(container("guard")["args"]).run_dir
    (name,) = (each["name"] for each in container("guard")["volumeMounts"] if each["mountPath"] == run_dir)
    (volume,) = (each for each in pod("guard")["volumes"] if each["name"] == name)
    assert "emptyDir" in volume


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_has_rights_at_the_api_server(variant: str) -> None:
    kinds = {each["kind"] for each in documents(emptied(variant))}
    assert kinds <= {"ServiceAccount", "ConfigMap", "DaemonSet"}
    for component in daemon_sets(variant):
        assert pod(component, variant)["automountServiceAccountToken"] is False


def test_the_host_paths_are_those_that_are_needed() -> None:
    assert host_paths("daemon") == {
        "/var/run/nri": "ro",
        "/run/nri-gpu": "rw",
        "/var/lib/nri-gpu/drivers": "rw",
        "/": "ro",
        "/dev": "rw",
    }
    assert host_paths("guard") == {"/var/run/nri": "ro", "/run/nri-gpu": "ro"}
    more = host_paths("daemon", "all of it").keys() - host_paths("daemon").keys()
    assert {path for path in more if not path.startswith("/var/lib/kubelet/")} == {
        "/etc/kubernetes/node-feature-discovery/features.d"
    }
    assert host_paths("guard", "all of it").keys() - host_paths("guard").keys() == {"/run/containerd"}


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


def test_staged_files_have_one_path_inside_and_outside() -> None:
    """Containers' mounts name it, and the runtime is outside."""
    stage = _parser().parse_args(container("daemon")["args"]).stage_dir
    (mount,) = (each for each in container("daemon")["volumeMounts"] if each["name"] == "stage")
    assert mount["mountPath"] == stage
    assert stage in host_paths("daemon")


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
    args = _parser().parse_args(container("daemon")["args"])
    (mount,) = (each for each in container("daemon")["volumeMounts"] if each["name"] == "driver-root")
    assert args.driver_root == mount["mountPath"]
    assert args.driver_host_root == values()["paths"]["driverRoot"]
    assert args.driver_host_root in host_paths("daemon")
