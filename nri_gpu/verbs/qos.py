"""The service class that the kubelet will give a pod of a manifest, as it shows in the pod's cgroup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_COUNTED: Final = ("cpu", "memory")  # other resources give no class (kubernetes: pkg/apis/core/v1/helper/qos)
_NOTHING: Final[Mapping[str, Any]] = {}


def cgroup_of(spec: Mapping[str, Any]) -> str:
    """The cgroup's parent. Quantities are compared as they are written: `1` and `1000m` count as different."""
    resources = [each if isinstance(each, Mapping) else _NOTHING for each in _resources(spec)]
    if not any(_counted(each, kind) for each in resources for kind in ("requests", "limits")):
        return "/kubepods/besteffort/pod"
    return "/kubepods/pod" if all(map(_guaranteed, resources)) else "/kubepods/burstable/pod"


def _resources(spec: Mapping[str, Any]) -> Iterator[object]:
    for kind in ("initContainers", "containers"):
        containers = spec.get(kind)
        for container in containers if isinstance(containers, list) else ():
            yield container.get("resources") if isinstance(container, Mapping) else None


def _guaranteed(resources: Mapping[str, Any]) -> bool:
    """Limits of both kinds, and requests that are the same or left out."""
    limits = _counted(resources, "limits")
    return len(limits) == len(_COUNTED) and {**limits, **_counted(resources, "requests")} == limits


def _counted(resources: Mapping[str, Any], kind: str) -> dict[str, str]:
    given = resources.get(kind)
    items = given.items() if isinstance(given, Mapping) else ()
    return {str(name): str(value) for name, value in items if name in _COUNTED and str(value) != "0"}
