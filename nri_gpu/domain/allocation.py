"""The kubelet's allocations to a container: written by our device plugin, or listed by PodResources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NewType

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import BASE_KEY, KUBELET_KEY
from nri_gpu.domain.value import Recorded

# A CDI device that Allocate answers. Its one edit is a bind mount of a path that cannot exist, so the container cannot
# start unless our reply removes the mount. `kubectl describe pod` then shows the path, which reads as a sentence.
REQUIRED_KIND: Final = f"{BASE_KEY}/daemon"
REQUIRED_NAME: Final = "required"
REQUIRED_SOURCE: Final = "/proc/nri-gpu-is-not-running-on-this-node"
REQUIRED_DESTINATION: Final = "/nri-gpu-is-not-running-on-this-node"
ClaimUid = NewType("ClaimUid", str)  # of a ResourceClaim
# The kind of CDI devices that stand for devices of claims, whatever name the driver has: devices of vendors below
# nvidia.com are left alone.
CLAIM_KIND: Final = f"{BASE_KEY}/claim"
REPLICA: Final = "::"  # between a UUID and the number of a replica, as NVIDIA's device plugin writes it


class AllocatedDevice(Recorded, frozen=True):
    """A device of a resource, by the id that the kubelet uses."""

    resource: str
    id: str

    @property
    def uuid(self) -> GpuUuid:
        """Return the UUID of the GPU or MIG device that it is, or is a replica of."""
        return GpuUuid(self.id.partition(REPLICA)[0])


class Allocated(Recorded, frozen=True, tag_field="kind", tag="allocated"):
    """The devices that the kubelet allocated to one container: none if its variable is `void`, or with `elsewhere`."""

    devices: tuple[AllocatedDevice, ...] = ()
    shared: bool = False
    # Where it stands on the container: our annotation, the variable that other device plugins set, or `claim
    # namespace/name`.
    key: str = KUBELET_KEY
    claims: tuple[ClaimUid, ...] = ()  # the ResourceClaims whose devices these are
    request: str = ""  # what the claims' configuration asks for, in the grammar of the annotation
    admin: bool = False  # for monitoring, beside whoever holds the devices
    elsewhere: bool = False  # other containers of its pod have GPUs, which the pod's annotation shapes
    part: float = 1.0  # of each device, that a scheduler of fractions gave to the pod; only the record counts by it

    @property
    def uuids(self) -> tuple[GpuUuid, ...]:
        """Return the GPUs and MIG devices, each once: two replicas of a GPU are that GPU."""
        return tuple(dict.fromkeys(each.uuid for each in self.devices))


class AllocationPending(Recorded, frozen=True, tag_field="kind", tag="pending"):
    """An allocation that PodResources has not told yet."""

    fault: str  # why not
    key: str  # of `Allocated`
    again: ClaimUid = ClaimUid("")  # the claim whose pods have to be asked for again, or empty if that is not awaited


class AllocationInvalid(Recorded, frozen=True, tag_field="kind", tag="invalid"):
    """An annotation or variable that is no allocation of the kubelet. fault: why not. key: of `Allocated`."""

    fault: str
    key: str = KUBELET_KEY


KubeletAllocation = Allocated | AllocationPending | AllocationInvalid


class ResourceStatus(Struct, frozen=True):
    """The state of one resource at the kubelet, as it is published.

    since_s: seconds since the epoch; None while it is not registered. fault: why not, or what is wrong with it.
    """

    resource: str
    registered: bool
    since_s: float | None
    fault: str


NVIDIA_DRIVER: Final = "gpu.nvidia.com"  # NVIDIA's DRA driver of GPUs (kubernetes-sigs/dra-driver-nvidia-gpu)


class DynamicDevice(Struct, frozen=True):
    """A device that NVIDIA's DRA driver prepared for a container, by the names in its slices, which are untrusted."""

    pool: str  # the node's name
    device: str


class ContainerDevices(Struct, frozen=True):
    """The devices that PodResources lists for a container. The ids are any device plugin's, so they are untrusted.

    claims: those by whose devices of ours it gets GPUs. prepared: devices of claims that NVIDIA's driver prepared.
    """

    name: str
    devices: tuple[AllocatedDevice, ...] = ()
    claims: frozenset[ClaimUid] = frozenset()
    prepared: tuple[DynamicDevice, ...] = ()

    def of(self, resource: str) -> frozenset[str]:
        """Return the ids of one resource's devices."""
        return frozenset(each.id for each in self.devices if each.resource == resource)


def claim_device(claim: ClaimUid, place: int) -> str:
    """Return the qualified name of the CDI device that stands for the claim's device at that place."""
    return f"{CLAIM_KIND}={claim}-{place}"


def claim_of_device(name: str) -> ClaimUid | None:
    """Return the claim that a qualified CDI device belongs to, or None if the device is not ours."""
    kind, _, device = name.partition("=")
    return ClaimUid(device.rpartition("-")[0]) if kind == CLAIM_KIND else None


class PodDevices(Struct, frozen=True):
    """The devices that PodResources lists for a pod, by container; not plain init containers, and not the pod's UID."""

    namespace: str
    name: str
    containers: tuple[ContainerDevices, ...] = ()

    def container(self, name: str) -> ContainerDevices | None:
        """Return the container of that name, or None if it is not listed."""
        return next((each for each in self.containers if each.name == name), None)

    @property
    def devices(self) -> tuple[AllocatedDevice, ...]:
        return tuple(device for each in self.containers for device in each.devices)


# Labels that KAI-Scheduler's binder, and Run:ai's, put on the pods of one GPU and on the pod that reserves it; on a pod
# with parts of several GPUs one label each (KAI-Scheduler: pkg/common/constants, pkg/common/resources).
GROUP: Final = "runai-gpu-group"
# Annotations by which a pod asks such a scheduler for a part of a GPU: of it, or MiB of its memory.
FRACTION: Final = "gpu-fraction"
FRACTION_MIB: Final = "gpu-memory"


def gpu_groups(labels: Mapping[str, str]) -> frozenset[str]:
    """Return the groups by which such a scheduler binds a pod to GPUs that another pod reserves."""
    of_several = {value for key, value in labels.items() if key.startswith(f"{GROUP}/")}
    return frozenset(of_several | {labels.get(GROUP, "")}) - {""}
