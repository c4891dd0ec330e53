"""Plain manifests below `deploy/manifests`: what Helm 4 renders, with the chart's defaults and in its other modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.support.helm import IMAGE, LACKING, render
from tools.files import ROOT, Files, LackingError

FOLDER: Final = ROOT / "deploy" / "manifests"
# File -> what it is for, and the values that are not the chart's defaults.
SETS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "nri-gpu.yaml": ("the kubelet allocates GPUs", {}),
    "annotations.yaml": ("pods get GPUs by annotation alone", {"kubelet": {"enabled": False}}),
    "labels.yaml": (
        "the kubelet allocates GPUs, Node Feature Discovery labels nodes, the guard stops containers",
        {"labels": {"enabled": True}, "guard": {"criDir": "/run/containerd"}},
    ),
    "watcher.yaml": (
        "the kubelet allocates GPUs, and finds their device plugin by itself",
        {"kubelet": {"registration": "watcher"}},
    ),
    "dra.yaml": (
        "the scheduler allocates GPUs, by claims",
        {"kubelet": {"enabled": False}, "dra": {"enabled": True}},
    ),
    "observe.yaml": (
        "nobody gets a GPU by it: an observer says who was given which, and who uses it",
        {"mode": "observe"},
    ),
}
# A class that claims a resource does so for the whole cluster, also where a device plugin still offers it.
NOTES: Final[Mapping[str, str]] = {
    "dra.yaml": """\
# Pods that limit nvidia.com/gpu wait with this file alone. Once no device plugin offers that resource on any node, and
# no other DeviceClass has it, add to the spec of the DeviceClass gpu.nri.io:
#   extendedResourceName: nvidia.com/gpu
""",
}
ORDER: Final = tuple(
    f"{each}.yaml" for each in ("serviceaccount", "configmap", "admission", "guard", "daemonset", "dra", "observe")
)
HELMS: Final = ("helm.sh/chart:", "app.kubernetes.io/managed-by:")
DAEMON: Final = "The daemon is privileged, and both mount folders of the host."
OBSERVER: Final = "The observer sees the processes of the host, and mounts folders of it."
HEAD: Final = """\
# {purpose}.
# Made from deploy/helm/nri-gpu with {values}, by `make generate`; do not edit here.
# The image has no registry in its name: put yours in its place, as docs/kubernetes-install.md says.
{note}apiVersion: v1
kind: Namespace
metadata:
  name: nri-gpu
  labels:
    # {rights}
    pod-security.kubernetes.io/enforce: privileged
"""


def _text(name: str) -> str:
    """Return all of one file, in the order to apply."""
    purpose, changed = SETS[name]
    texts = render(**changed)
    assert set(texts) <= set(ORDER)
    head = HEAD.format(
        purpose=f"{purpose[0].upper()}{purpose[1:]}",
        values=" ".join(as_options(changed)),
        note=NOTES.get(name, ""),
        rights=OBSERVER if "observe.yaml" in texts else DAEMON,
    )
    return head + "".join(f"---\n{_as_applied(texts[each])}\n" for each in ORDER if each in texts)


def as_options(changed: Mapping[str, Any]) -> list[str]:
    """Return values as Helm's command line takes them."""
    given = {"image": {"repository": IMAGE}, **changed}
    tables = {table: keys for table, keys in given.items() if isinstance(keys, Mapping)}
    pairs = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
    pairs |= {key: value for key, value in given.items() if key not in tables}
    return ["--set", ",".join(f"{path}={str(value).lower()}" for path, value in pairs.items())]


def _as_applied(text: str) -> str:
    """Drop labels of Helm, which does not apply these documents, and blanks at the ends of lines, as editors do."""
    lines = (line.rstrip() for line in text.strip().splitlines())
    return "\n".join(line for line in lines if not line.lstrip().startswith(HELMS))


def manifests() -> Files:
    """Return all files, and None for each that is there and not one of them."""
    if LACKING:
        raise LackingError(LACKING)
    return {**dict.fromkeys(FOLDER.glob("*.yaml")), **{FOLDER / name: _text(name) for name in SETS}}
