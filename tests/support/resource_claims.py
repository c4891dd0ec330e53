"""ResourceClaims as the API server has them, as JSON values."""

from __future__ import annotations

import json
from typing import Any

DRIVER = "gpu.nri.io"
NODE = "node-1"
UID = "5a1c9b1e-0d5f-4a63-8f86-0a54a1c7e001"
POD = "7f000000-0000-4000-8000-00000000000a"
CONFIG = {"apiVersion": "gpu.nri.io/v1", "kind": "GpuConfig"}


def result(device: str = "gpu-0", request: str = "gpu", **more: object) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


def opaque(parameters: object, *requests: str, source: str = "FromClaim", driver: str = DRIVER) -> dict[str, Any]:
    """One entry of `allocation.devices.config`."""
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def resource_claim(
    *results: dict[str, Any],
    uid: str = UID,
    name: str = "train",
    config: list[dict[str, Any]] | None = None,
    pods: dict[str, str] | None = None,
    groups: dict[str, str] | None = None,
    owner: str = "",
) -> dict[str, Any]:
    """An allocated claim. pods, groups: UID -> name. owner: kind of the object that it was made for."""
    consumers = {POD: "web"} if pods is None else pods
    owners = [{"apiVersion": "v1", "kind": owner, "name": "web", "uid": POD, "controller": True}] if owner else []
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ml", "uid": uid, "ownerReferences": owners},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
        "status": {
            "allocation": {"devices": {"results": list(results) or [result()], "config": config or []}},
            "reservedFor": [
                *(consumer("pods", uid=uid, name=each) for uid, each in consumers.items()),
                *(
                    consumer("podgroups", "scheduling.k8s.io", uid=uid, name=each)
                    for uid, each in (groups or {}).items()
                ),
            ],
        },
    }


def consumer(resource: str, group: str = "", *, uid: str, name: str = "x") -> dict[str, str]:
    """An entry of `reservedFor`."""
    return {"resource": resource, "name": name, "uid": uid, **({"apiGroup": group} if group else {})}


def document(claim: dict[str, Any]) -> bytes:
    return json.dumps(claim).encode()
