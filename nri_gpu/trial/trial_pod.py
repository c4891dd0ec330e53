"""The pod by which `helm test` asks for a GPU, and its claim: one for each way that the release lets pods ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never

import msgspec
from msgspec import Struct

from nri_gpu.decision.offered import Way
from nri_gpu.domain.names import BASE_KEY
from nri_gpu.policy.model import Policy

Manifest = dict[str, Any]
# What it says is read in the pod's status, so that no right to read logs is needed.
SCRIPT: Final = """\
exec >/dev/termination-log 2>&1
echo "${NRI_GPU_UUIDS:-$NVIDIA_VISIBLE_DEVICES}"
driver=/proc/driver/nvidia/version
if [ -r $driver ]; then head -n 1 $driver; else echo "no driver is loaded on this node"; fi
if command -v nvidia-smi >/dev/null; then nvidia-smi -L; fi
"""


class Attempt(Struct, frozen=True):
    """A way to ask for a GPU. asked: the resource or the DeviceClass; empty for an annotation."""

    way: Way
    asked: str = ""

    @property
    def phrase(self) -> str:
        """Return what is tried, as a subject."""
        match self.way:
            case Way.KUBELET:
                return f"a pod with {self.asked}: 1 in its limits"
            case Way.DRA:
                return f"a pod with a ResourceClaim of the DeviceClass {self.asked}"
            case Way.ANNOTATION:
                return f"a pod with the annotation {BASE_KEY}: 1"
            case _:
                assert_never(self.way)


def attempts(policy: Policy) -> tuple[Attempt, ...]:
    """Return the ways by which policy lets pods ask: kubelet and claims, or annotations where neither is on."""
    kubelet = Attempt(Way.KUBELET, policy.kubelet.names[0] + policy.kubelet.suffix)
    found = [kubelet] if policy.kubelet.enabled else []
    found += [Attempt(Way.DRA, policy.dra.driver)] if policy.dra.enabled else []
    return tuple(found) or (Attempt(Way.ANNOTATION),)


class JobReference(Struct, frozen=True, rename="camel"):
    """An object that a pod belongs to, and goes with."""

    api_version: str
    kind: str
    name: str
    uid: str


class OwnMetadata(Struct, frozen=True, rename="camel"):
    """The owners of the pod in which this program runs: the Job."""

    owner_references: tuple[JobReference, ...] = ()


class OwnContainer(Struct, frozen=True, rename="camel"):
    """The image in which this program runs."""

    image: str
    image_pull_policy: str = "IfNotPresent"


class OwnSpec(Struct, frozen=True, rename="camel"):
    """The part of our pod's spec that the pod to try has, too."""

    containers: tuple[OwnContainer, ...]
    image_pull_secrets: tuple[Mapping[str, str], ...] = ()


class OwnPod(Struct, frozen=True):
    """The pod in which this program runs."""

    metadata: OwnMetadata
    spec: OwnSpec


def trial_pod(attempt: Attempt, own: OwnPod, name: str, place: Mapping[str, object]) -> Manifest:
    """Return a pod like a user's. name: its own, and its claim's. place: on which nodes, as fields of its spec.

    It belongs to the Job, so that it goes with it however this program ends.
    """
    container: Manifest = {
        "name": "gpu",
        "image": own.spec.containers[0].image,
        "imagePullPolicy": own.spec.containers[0].image_pull_policy,
        "command": ["sh", "-c", SCRIPT],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "securityContext": {
            "capabilities": {"drop": ["ALL"]},
            "allowPrivilegeEscalation": False,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec: Manifest = {
        **place,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": list(own.spec.image_pull_secrets),
        "containers": [container],
    }
    metadata = _metadata(own, name)
    match attempt.way:
        case Way.KUBELET:
            container["resources"]["limits"] = {attempt.asked: 1}
        case Way.DRA:
            container["resources"]["claims"] = [{"name": "gpu"}]
            spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
        case Way.ANNOTATION:
            metadata["annotations"] = {BASE_KEY: "1"}
        case _:
            assert_never(attempt.way)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def trial_claim(attempt: Attempt, own: OwnPod, name: str, api_version: str) -> Manifest:
    """Return a claim for one device of the class."""
    request = {"name": "gpu", "exactly": {"deviceClassName": attempt.asked}}
    spec = {"devices": {"requests": [request]}}
    return {"apiVersion": api_version, "kind": "ResourceClaim", "metadata": _metadata(own, name), "spec": spec}


def _metadata(own: OwnPod, name: str) -> Manifest:
    return {"name": name, "ownerReferences": msgspec.to_builtins(list(own.metadata.owner_references))}
