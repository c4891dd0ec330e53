"""ResourceClaims of Kubernetes' Dynamic Resource Allocation (DRA) that are prepared on this node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.allocation import ClaimUid as ClaimUid
from nri_gpu.domain.container import Container, PodUid
from nri_gpu.domain.gpu import Gpu, GpuUuid, Unit, whole
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.value import Recorded

# The API server's UIDs have dashes; those that the kubelet makes, of static pods, have none.
_UID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}[A-Za-z0-9])?")


class AllocatedResult(Struct, frozen=True, kw_only=True):
    """A result of a claim's allocation that is for our driver."""

    request: str  # the claim's name for it
    pool: str
    device: str
    text: str = ""  # what else its configuration asks for, in the annotation's grammar, or empty
    share_id: str = ""
    admin: bool = False  # for monitoring, beside whoever holds the device: it holds nothing itself

    @property
    def identity(self) -> tuple[str, str, str, str, bool]:
        """Return the key that tells this result from that of a later allocation of the same claim."""
        return self.request, self.pool, self.device, self.share_id, self.admin


class AllocatedClaim(Struct, frozen=True, kw_only=True):
    """A ResourceClaim as the API server has it."""

    uid: ClaimUid
    namespace: str
    name: str
    pods: dict[PodUid, str]  # of `reservedFor`, UID -> name
    results: tuple[AllocatedResult, ...]
    owned: bool = False  # one pod is its owner
    groups: Mapping[str, str] = {}  # the PodGroups of `reservedFor`, UID -> name
    others: tuple[str, ...] = ()  # what else is in `reservedFor`, such as `jobs.batch`; none of it is served


class ClaimedDevice(AllocatedResult, Recorded, frozen=True, kw_only=True):
    """A result whose device was found on this node. mode: how it is held."""

    uuid: GpuUuid
    mode: Mode


class PreparedClaim(Recorded, frozen=True, kw_only=True, omit_defaults=True):
    """A claim from NodePrepareResources to NodeUnprepareResources. It holds its GPUs for its pods for that long."""

    uid: ClaimUid
    namespace: str
    name: str
    pods: dict[PodUid, str]  # those it is reserved for and `members`, UID -> name
    devices: tuple[ClaimedDevice, ...]
    owned: bool = False  # it was made for one pod, so that seldom another pod comes for it
    groups: Mapping[str, str] = {}  # the PodGroups that it is reserved for, UID -> name
    # Pods for which the kubelet's PodResources names it, while it is reserved for groups -> those of their containers
    # for which PodResources does not.
    members: Mapping[PodUid, tuple[str, ...]] = {}

    def is_for(self, container: Container) -> bool:
        """Return whether a container that has the claim's markers may have its devices."""
        uid = container.pod.uid
        return uid in self.pods and container.name not in self.members.get(uid, ())

    @property
    def holds(self) -> Mapping[GpuUuid, Mode]:
        """Return the GPUs and MIG devices that the claim keeps from others, and how."""
        return {each.uuid: each.mode for each in self.devices if not each.admin}

    @property
    def called(self) -> str:
        """Return `claim ml/train`, as sentences name it among pods."""
        return f"claim {self.namespace}/{self.name}"


class ClaimHold(Struct, frozen=True):
    """The hold of a prepared claim on one GPU."""

    claim: PreparedClaim
    mode: Mode


def device_name(unit: Unit) -> str:
    """Return a unit's name in ResourceSlices: `gpu-0`, `gpu-0-mig-1g10gb-me-7-0`; a DNS label.

    A MIG device's instance ids come last, so that an instance that is made anew with another profile has another name.
    """
    name = f"gpu-{whole(unit).minor_number}"
    if isinstance(unit, Gpu):
        return name
    device = unit.device
    return f"{name}-mig-{profile_label(device.profile)}-{device.gpu_instance_id}-{device.compute_instance_id}"


def profile_label(profile: str) -> str:
    """Return a MIG profile as part of a device's name, as NVIDIA's driver writes it, too: `1g10gb-me`."""
    return profile.replace(".", "").replace("+", "-")


def usable_uid(uid: str) -> bool:
    """Return whether a UID can be part of names of files, devices and variables, as those that Kubernetes makes can."""
    return bool(_UID.fullmatch(uid))
