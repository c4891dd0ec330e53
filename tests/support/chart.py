"""The chart in each of its variants, as Helm renders it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.support.helm import Release, documents

ELSEWHERE = Release("other", "elsewhere")
CLAIMS: dict[str, Any] = {"kubelet": {"enabled": False}, "dra": {"enabled": True}}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    "annotations": {"kubelet": {"enabled": False}},
    "beside": {"kubelet": {"enabled": False, "podResources": True}},
    "all of it": {
        "policy": '[namespaces]\nallow = ["*"]\n',
        "kubelet": {"registration": "watcher", "root": "/data/kubelet"},
        "labels": {"enabled": True},
        "admission": {"action": "Deny", "namespaceSelector": {"matchLabels": {"team": "gpu"}}},
        "guard": {"criDir": "/run/containerd"},
        "image": {"tag": "1.2.3"},
        "imagePullSecrets": ["registry"],
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "gpu"},
        "updateStrategy": {"type": "OnDelete"},
    },
    "old names": {
        "metrics": {"enabled": True, "scrape": "serviceMonitor", "labels": {"release": "prometheus"}},
        "image": {"pullSecrets": [{"name": "registry"}]},
        "maxSurge": "10%",
    },
    "mps": {"policy": "[mps]\nenabled = true\n", "mps": {"enabled": True, "size": "8g"}},
    "stray": {"kubelet": {"enabled": False}, "stray": {"enabled": True}},
    "health": {"health": {"criDir": "/run/containerd"}},
    "claims": CLAIMS | {"dra": {"enabled": True, "extendedResource": "nvidia.com/gpu"}},
    "claims elsewhere": CLAIMS | {"kubelet": {"enabled": False, "root": "/data/kubelet"}},
    "metrics": {"metrics": {"enabled": True}},
    "scraped by the operator": {
        "metrics": {
            "enabled": True,
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "port": 9999,
        },
    },
    "least of it": {
        "guard": {"enabled": False},
        "admission": {"enabled": False},
        "affinity": {"nodeAffinity": None},
        "tolerations": [],
        "nodeSelector": {"kubernetes.io/os": None},
        "resources": {"requests": None, "limits": {"cpu": 0.5}},
    },
    "kubelet by name": {"mode": "", "kubelet": {"enabled": True}},
    "nulls": {
        **dict.fromkeys(("affinity", "tolerations", "nodeSelector", "resources", "podAnnotations", "podLabels")),
        "guard": {"resources": None},
        "admission": {"namespaceSelector": None},
        "metrics": {"labels": None, "serviceMonitor": None},
    },
}
# Of releases that only observe.
OBSERVING: Mapping[str, dict[str, Any]] = {
    "observe": {"mode": "observe"},
    "observe with NVML": {"mode": "observe", "observe": {"nvml": True}},
    "observe all of it": {
        "mode": "observe",
        "observe": {"nvml": True, "libraries": "lib64", "runtimes": ["docker", "podman"], "priorityClassName": "low"},
        "paths": {"driverRoot": "/run/nvidia/driver"},
        "policy": "[observe]\nxids = true\n",
        "simulation": "# none",
        "kubelet": {"root": "/data/kubelet"},
        "metrics": {"enabled": True, "serviceMonitor": {"enabled": True}},
        "imagePullSecrets": [{"name": "registry"}],
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "gpu"},
    },
    "observe least of it": {
        "mode": "observe",
        "observe": {"resources": None, "runtimes": None},
        "affinity": {"nodeAffinity": None},
        "metrics": {"enabled": True},
    },
}

# Component -> its verb, the values that bring it, and the table in which its extras are.
COMPONENTS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "daemon": ("run", {"policy": "[limits]\n", "mps": {"enabled": True}}, ""),
    "guard": ("guard", {"policy": "[limits]\n"}, "guard"),
    "dra": ("dra", CLAIMS, "dra"),
    "observe": ("observe", {"mode": "observe", "observe": {"nvml": True, "runtimes": ["k3s", "podman"]}}, "observe"),
}
EXTRAS: dict[str, Any] = {
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy"},
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ],
    "extraArgs": ["--future=a b: c", "--another"],
    "extraVolumes": [{"name": "certificates", "configMap": {"name": "ours"}}, {"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [
        {"name": "certificates", "mountPath": "/etc/ssl/certs", "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp"},
    ],
}
COMMON: dict[str, Any] = {
    "commonLabels": {"team": "a"},
    "podLabels": {"team": "b"},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "image": {"registry": "registry.example.com:5000", "digest": f"sha256:{'0123456789abcdef' * 4}"},
    "imagePullSecrets": ["a", {"name": "b"}],
    "updateStrategy": {"rollingUpdate": {"maxSurge": 2}},
    "extraObjects": [
        "{{ if true }}{apiVersion: v1, kind: ConfigMap, metadata: {name: '{{ .Release.Name }}-a'}}{{ end }}"
    ],
}
# All that the values may add to one component's pods, and labels and annotations of ones own.
CROWDED: Mapping[str, dict[str, Any]] = {
    component: {**base, **COMMON, **(EXTRAS if not table else {table: {**base.get(table, {}), **EXTRAS}})}
    | {"tolerateMissingKeys": ["a", "a"], "metrics": {"enabled": True}}
    for component, (_, base, table) in COMPONENTS.items()
}


@cache
def found(variant: str = "defaults") -> list[dict[str, Any]]:
    return documents(ELSEWHERE, **{**VARIANTS, **OBSERVING}[variant])


def one(among: list[dict[str, Any]], kind: str, name: str) -> Any:  # noqa: ANN401 - parsed YAML
    (only,) = (each for each in among if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return only


def daemon_sets(variant: str = "defaults") -> dict[str, dict[str, Any]]:
    sets = [each for each in found(variant) if each["kind"] == "DaemonSet"]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in sets}


def pod(component: str, variant: str = "defaults") -> Any:  # noqa: ANN401 - parsed YAML
    return daemon_sets(variant)[component]["spec"]["template"]["spec"]


def container(component: str, variant: str = "defaults") -> Any:  # noqa: ANN401 - parsed YAML
    (only,) = pod(component, variant)["containers"]
    return only


def mount(component: str, variant: str = "defaults", **fields: str) -> Any:  # noqa: ANN401 - parsed YAML
    """The container's mount with this field."""
    (only,) = (each for each in container(component, variant)["volumeMounts"] if fields.items() <= each.items())
    return only


def host_paths(component: str, variant: str = "defaults") -> dict[str, str]:
    """Host path -> `ro` or `rw`."""
    read_only = {each["name"]: each.get("readOnly") for each in container(component, variant)["volumeMounts"]}
    volumes = [each for each in pod(component, variant)["volumes"] if "hostPath" in each]
    return {each["hostPath"]["path"]: "ro" if read_only[each["name"]] else "rw" for each in volumes}
