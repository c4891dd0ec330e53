"""What the kubelet gave to a container, as its device plugin half wrote it and its NRI half read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import BASE_KEY, KUBELET_KEY

# A CDI device that Allocate answers. Its one edit is a bind mount from a place where nothing can be, so the container
# cannot start unless our reply takes the mount away again. The place is the sentence that `kubectl describe pod` shows.
REQUIRED_KIND: Final = f"{BASE_KEY}/daemon"
REQUIRED_NAME: Final = "required"
REQUIRED_SOURCE: Final = "/proc/nri-gpu-is-not-running-on-this-node"
REQUIRED_DESTINATION: Final = "/nri-gpu-is-not-running-on-this-node"
REPLICA: Final = "::"  # between a UUID and the number of a replica, as NVIDIA's device plugin writes it


class AllocatedDevice(Struct, frozen=True):
    """One device of one resource, by the id that the kubelet counts it by."""

    resource: str
    id: str

    @property
    def uuid(self) -> GpuUuid:
        """Of the GPU or MIG device that it is, or is a replica of."""
        return GpuUuid(self.id.partition(REPLICA)[0])


class KubeletAllocation(Struct, frozen=True):
    """All that the kubelet gave to one container. fault: why that is worth nothing; empty when it holds.

    key: by what it came to the container: our plugin's annotation, or the variable that others' plugins set. waits: the
    fault is that the kubelet has not told yet.
    """

    devices: tuple[AllocatedDevice, ...] = ()
    shared: bool = False
    fault: str = ""
    key: str = KUBELET_KEY
    waits: bool = False

    @property
    def uuids(self) -> tuple[GpuUuid, ...]:
        """GPUs and MIG devices, each once: two replicas of one are one."""
        return tuple(dict.fromkeys(each.uuid for each in self.devices))


class ResourceStatus(Struct, frozen=True):
    """How one resource stands with the kubelet.

    since: registered since, seconds since the epoch; None while it is not. fault: why not, or what is wrong with it.
    """

    resource: str
    since: float | None = None
    fault: str = ""


class ContainerDevices(Struct, frozen=True):
    """What PodResources lists for a container. Not ours to believe of ids: they are any device plugin's."""

    name: str
    devices: tuple[AllocatedDevice, ...] = ()

    def of(self, resource: str) -> frozenset[str]:
        """Ids of one resource."""
        return frozenset(each.id for each in self.devices if each.resource == resource)


class PodDevices(Struct, frozen=True):
    """What PodResources lists for a pod: for each container by name, plain init containers aside. It tells no UID."""

    namespace: str
    name: str
    containers: tuple[ContainerDevices, ...] = ()

    def container(self, name: str) -> ContainerDevices | None:
        """One of them; None where it is not listed, as plain init containers never are."""
        return next((each for each in self.containers if each.name == name), None)

    @property
    def devices(self) -> tuple[AllocatedDevice, ...]:
        """Of all its containers."""
        return tuple(device for each in self.containers for device in each.devices)


# Labels that KAI-Scheduler's binder, and Run:ai's, put on the pods of one GPU and on the pod that reserves it; on a pod
# with parts of several GPUs one label each (KAI-Scheduler: pkg/common/constants, pkg/common/resources).
GROUP: Final = "runai-gpu-group"


def gpu_groups(labels: Mapping[str, str]) -> frozenset[str]:
    """The groups by which such a scheduler binds a pod to GPUs that another pod reserves."""
    of_several = {value for key, value in labels.items() if key.startswith(f"{GROUP}/")}
    return frozenset(of_several | {labels.get(GROUP, "")}) - {""}


def kubelet_key(annotations: Iterable[str]) -> str:
    """The first key by which the kubelet handed something over; empty where it did not."""
    return next((key for key in annotations if key == KUBELET_KEY or key.startswith(f"{KUBELET_KEY}.")), "")
