"""The Helm chart in mode observe: nothing is in the release but the observer, and it mounts no socket of a runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest

from nri_gpu.cli.main import parse
from nri_gpu.domain.names import DEFAULT_OBSERVE
from nri_gpu.observe.runtime_table import mounted_folders
from nri_gpu.policy.document import options_in
from nri_gpu.policy.metrics_settings import metrics_faults
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import PolicyText, build_policy
from nri_gpu.verify.oci_bundles import TASKS
from tests.support.chart import (
    ELSEWHERE,
    OBSERVING,
    VARIANTS,
    container,
    daemon_sets,
    found,
    host_paths,
    mount,
    one,
    pod,
)
from tests.support.helm import CHART, RefusedError, documents, render, values

SCHEMA = json.loads((CHART / "values.schema.json").read_text())["properties"]
OBSERVE = SCHEMA["observe"]["properties"]
RUNTIMES = OBSERVE["runtimes"]["items"]["enum"]
NOTHING_ELSE = {"ServiceAccount", "ConfigMap", "DaemonSet"}
SCRAPED = {"Service", "ServiceMonitor"}
TASK_FOLDER = f"/run/containerd/{TASKS}"
# Whoever connects to one of these is root on the node, or has its containers in his hand.
SOCKETS = (
    *("/run/containerd/containerd.sock", "/run/containerd/containerd.sock.ttrpc", "/run/containerd/s/0123"),
    *("/run/k3s/containerd/containerd.sock", "/run/k3s/containerd/s/0123", "/run/k0s/containerd.sock"),
    *("/run/k0s/containerd/containerd.sock", "/var/snap/microk8s/common/run/containerd.sock"),
    *("/run/docker.sock", "/run/docker/containerd/containerd.sock", "/run/docker/containerd/s/0123"),
    *("/run/cri-dockerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock", "/run/nri/nri.sock"),
    *("/run/nri-gpu/control.sock", "/run/systemd/private", "/run/dbus/system_bus_socket"),
    *("/var/lib/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet/plugins_registry/gpu.example.com-reg.sock"),
)
FOLDERS = ("/run", "/var", "/var/run", "/var/lib", "/run/containerd", "/var/run/nri", "/var/lib/docker", "/run/k3s")


@pytest.mark.parametrize("variant", OBSERVING)
def test_kubernetes_takes_it(variant: str) -> None:
    for document in found(variant):
        assert document["metadata"]["namespace"] == "elsewhere"
        if document["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_release_has_nothing_but_the_observer_whatever_else_is_set(variant: str) -> None:
    ways = {"kubelet": {**VARIANTS[variant].get("kubelet", {}), "enabled": "auto"}, "dra": {"enabled": False}}
    made = documents(ELSEWHERE, **{"policy": "[limits]\n", **VARIANTS[variant], **ways, "mode": "observe"})
    assert {each["kind"] for each in made} - SCRAPED == NOTHING_ELSE
    assert sum(each["kind"] in NOTHING_ELSE for each in made) == len(NOTHING_ELSE)
    assert one(made, "DaemonSet", "other-observe")


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ({"kubelet": {"enabled": True}}, "set kubelet.enabled=auto"),
        ({"dra": {"enabled": True}}, "dra.enabled=false"),
    ],
    ids=str,
)
def test_a_way_that_is_switched_on_beside_it_is_refused_with_a_sentence(way: Mapping[str, Any], named: str) -> None:
    with pytest.raises(RefusedError, match=f"mode observe gives no pod a GPU.*{named}"):
        render(mode="observe", **way)


def test_without_a_device_plugin_of_ours_it_is_as_by_default() -> None:
    assert documents(mode="observe", kubelet={"enabled": False}) == documents(mode="observe")


def test_a_table_that_is_taken_away_counts_as_its_defaults() -> None:
    assert documents(mode="observe", observe=None) == documents(mode="observe")


@pytest.mark.parametrize("mode", ["", None])
def test_without_the_mode_auto_means_true(mode: str | None) -> None:
    assert values()["kubelet"]["enabled"] == "auto"
    assert documents(mode=mode) == documents(kubelet={"enabled": True}) != documents(kubelet={"enabled": False})


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "watch"},
        {"mode": "observe", "kubelet": {"enabled": "true"}},
        {"kubelet": {"enabled": None}},
        {"observe": {"runtimes": ["lxc"]}},
        {"observe": {"runtimes": ["docker", "docker"]}},
        {"observe": {"libraries": ".."}},
        {"observe": {"nvml": "yes"}},
        {"observe": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(RefusedError, match="values don't meet the specifications of the schema"):
        render(**wrong)


def test_one_mode_follows_another_in_place() -> None:
    """What both releases have may be changed in place; the selectors of DaemonSets tell all pods apart."""
    metrics: dict[str, Any] = {"metrics": {"enabled": True, "serviceMonitor": {"enabled": True}}}
    modes = [documents(mode=mode, **metrics) for mode in ("", "observe")]
    names = [{(each["kind"], each["metadata"]["name"]) for each in made} for made in modes]
    assert names[0] & names[1] == {
        ("ServiceAccount", "nri-gpu"),
        ("ConfigMap", "nri-gpu-policy"),
        ("Service", "nri-gpu-metrics"),
        ("ServiceMonitor", "nri-gpu"),
    }
    sets = [each["spec"] for made in modes for each in made if each["kind"] == "DaemonSet"]
    for each in sets:
        chosen = each["selector"]["matchLabels"].items()
        assert [other for other in sets if chosen <= other["template"]["metadata"]["labels"].items()] == [each]
    for made, component in zip(modes, ("daemon", "observe"), strict=True):
        scraped = one(made, "Service", "nri-gpu-metrics")["spec"]["selector"].items()
        labels = [each["spec"]["template"]["metadata"]["labels"] for each in made if each["kind"] == "DaemonSet"]
        assert [each["app.kubernetes.io/component"] for each in labels if scraped <= each.items()] == [component]


# --- what it may do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", OBSERVING)
def test_its_rights_are_those_of_its_grade(variant: str) -> None:
    spec, nvml = pod("observe", variant), "nvml" in OBSERVING[variant].get("observe", {})
    assert spec["automountServiceAccountToken"] is False
    assert {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace", "initContainers"} & spec.keys() == {"hostPID"}
    assert spec.get("priorityClassName") == OBSERVING[variant].get("observe", {}).get("priorityClassName")
    rights: dict[str, Any] = {"runAsUser": 0, "readOnlyRootFilesystem": True}
    if nvml:
        rights |= {"privileged": True}
        assert not container("observe", variant)["terminationMessagePath"].startswith("/dev")
    else:
        capabilities = {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
        rights |= {"capabilities": capabilities, "allowPrivilegeEscalation": False}
        rights |= {"seccompProfile": {"type": "RuntimeDefault"}, "appArmorProfile": {"type": "Unconfined"}}
    assert container("observe", variant)["securityContext"] == rights


CGROUPS = {"/sys/fs/cgroup": "ro"}
KUBELET = {"/var/lib/kubelet/pod-resources": "ro"}
HOST_PATHS = {
    "observe": CGROUPS | KUBELET | {TASK_FOLDER: "ro"},
    "observe with NVML": CGROUPS | KUBELET | {TASK_FOLDER: "ro", "/usr": "ro", "/dev": "rw"},
    "observe all of it": CGROUPS
    | {"/var/lib/docker/containers": "ro", "/var/lib/containers/storage/overlay-containers": "ro"}
    | {"/run/containers/storage/overlay-containers": "ro"}
    | {"/data/kubelet/pod-resources": "ro", "/run/nvidia/driver/lib64": "ro", "/dev": "rw"},
    "observe least of it": CGROUPS | KUBELET | {TASK_FOLDER: "ro"},
}


@pytest.mark.parametrize("variant", OBSERVING)
def test_the_host_paths_are_those_that_are_needed_and_none_is_made(variant: str) -> None:
    assert host_paths("observe", variant) == HOST_PATHS[variant]
    volumes = [each["hostPath"] for each in pod("observe", variant)["volumes"] if "hostPath" in each]
    assert {each["type"] for each in volumes} == {"Directory"}


def test_the_folders_of_runtimes_lie_where_the_host_has_them() -> None:
    made = documents(mode="observe", observe={"runtimes": RUNTIMES})
    spec = one(made, "DaemonSet", "nri-gpu-observe")["spec"]["template"]["spec"]
    source = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    inside = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    folders = {name: path for name, path in source.items() if name.startswith("bundles-")}
    assert folders.items() <= inside.items()
    assert set(folders.values()) == set(mounted_folders())
    assert len(folders) == len(set(folders.values()))  # Podman and CRI-O share one
    for runtime in RUNTIMES:
        assert documents(mode="observe", observe={"runtimes": [runtime]})


def test_mounts_of_containers_in_these_folders_are_not_kept_and_not_written_to() -> None:
    for name in ("bundles-0", "bundles-1", "bundles-2"):
        assert mount("observe", "observe all of it", name=name)["mountPropagation"] == "HostToContainer"
    assert mount("observe", "observe", name="bundles-0")["recursiveReadOnly"] == "IfPossible"


def samples(schema: Mapping[str, Any], sample: object) -> Iterator[object]:
    """Values that a schema takes: each of a list, both of a boolean, folders for a path."""
    if schema.get("$ref", "").startswith("#/definitions/folder") or "/" in str(sample):
        yield from FOLDERS
    elif items := schema.get("items", {}).get("enum"):
        yield from ([each] for each in items)
        yield items
    elif "properties" not in schema:
        yield from schema.get("enum", (True, False) if schema.get("type") == "boolean" else (sample,))


def every_value() -> Iterator[dict[str, Any]]:
    """Each value of each key of each table, beside the observer that mounts most."""
    most = {"mode": "observe", "observe": {"nvml": True, "runtimes": RUNTIMES}}
    for table, schema in SCHEMA.items():
        if table in ("mode", "global") or table not in values():
            continue
        default = values()[table]
        for key, below in schema.get("properties", {}).items():
            for value in samples(below, default.get(key)):
                yield {**most, table: {**most.get(table, {}), key: value}}  # type: ignore[dict-item]
        yield from ({**most, table: value} for value in samples(schema, default))


def test_no_folder_that_is_mounted_holds_a_runtimes_socket() -> None:
    seen = set[str]()
    for given in every_value():
        try:
            made = documents(**given)
        except RefusedError:
            continue
        spec = one(made, "DaemonSet", "nri-gpu-observe")["spec"]["template"]["spec"]
        seen |= {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert seen > {"/usr", "/lib64", "/var/run/nri/usr", "/run/pod-resources", TASK_FOLDER}
    real = {path: f"{path.replace('/var/run/', '/run/')}/" for path in seen}
    assert [path for path, folder in real.items() for socket in SOCKETS if socket.startswith(folder)] == []
    assert not seen & {"/", "/run", "/var/run", "/var/lib/docker"}


# --- what it is told -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", OBSERVING)
def test_the_policy_is_the_users_and_empty_by_default(variant: str) -> None:
    text = one(found(variant), "ConfigMap", "other-policy")["data"]["policy.toml"]
    policy = build_policy(PolicyText("values.yaml", text), {})
    own = "policy" in OBSERVING[variant]
    assert policy.observe.xids is own
    assert own or policy == build_policy(PolicyText("none", ""), {})
    assert policy.kubelet.pool == Policy.default().kubelet.pool


@pytest.mark.parametrize("variant", OBSERVING)
def test_the_program_takes_its_arguments_and_looks_where_folders_are(variant: str) -> None:
    args = parse(*container("observe", variant)["args"])
    assert args.module == "nri_gpu.cli.observe_command"
    assert args.watch_policy
    assert args.policy == f"{mount('observe', variant, name='policy')['mountPath']}/policy.toml"
    assert args.run_dir == str(DEFAULT_OBSERVE)
    assert (args.gpus is not None) == ("simulation" in OBSERVING[variant])
    text = one(found(variant), "ConfigMap", "other-policy")["data"]["policy.toml"]
    settings = build_policy(PolicyText("values.yaml", text), options_in(vars(args)))
    assert settings.kubelet.podresources.startswith(f"{mount('observe', variant, name='pod-resources')['mountPath']}/")
    assert settings.metrics.listen == ("0.0.0.0:9464" if "metrics" in OBSERVING[variant] else "")
    assert not list(metrics_faults(settings.metrics))
    if OBSERVING[variant].get("observe", {}).get("nvml"):
        assert mount("observe", variant, name="driver")["mountPath"].startswith(f"{settings.driver.root}/")
        assert settings.driver.host_root == OBSERVING[variant].get("paths", {}).get("driverRoot", "/")


def test_its_probes_read_the_file_of_its_own_folder() -> None:
    chosen = container("observe", "observe")
    assert "--run-dir=/run/nri-gpu-observe" in chosen["args"]
    own = mount("observe", "observe", mountPath="/run/nri-gpu-observe")["name"]
    (volume,) = (each for each in pod("observe", "observe")["volumes"] if each["name"] == own)
    assert volume["emptyDir"]["medium"] == "Memory"
    probes = {name: each["exec"]["command"][3:] for name, each in chosen.items() if name.endswith("Probe")}
    alive = ["/run/nri-gpu-observe/alive", "30"]
    assert probes == {"livenessProbe": alive, "readinessProbe": [*alive, "ready"]}


def test_metrics_are_found_by_annotations_or_by_the_operator() -> None:
    annotations = daemon_sets("observe least of it")["observe"]["spec"]["template"]["metadata"]["annotations"]
    assert (annotations["prometheus.io/scrape"], annotations["prometheus.io/port"]) == ("true", "9464")
    assert "--metrics=0.0.0.0:9464" in container("observe", "observe least of it")["args"]
    assert not any("metrics" in each for each in container("observe", "observe")["args"])
    kinds = {each["kind"] for each in found("observe all of it")}
    assert kinds == NOTHING_ELSE | SCRAPED
