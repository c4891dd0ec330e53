"""The GPUs that containers were given: the kubelet's list joined with what bundles and processes show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.allocation import REPLICA
from nri_gpu.domain.bounds import MODESET_MINOR
from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import listed, shown
from nri_gpu.observe.given import Given, GivenDevice, PodContainer
from nri_gpu.observe.looks import SeenContainer
from nri_gpu.observe.resolve import resolved
from nri_gpu.observe.unit_access import UnitAccess
from nri_gpu.stray.judge import usual_node

NAME_MAX: Final = 253  # characters of a Kubernetes name
CDI, DOCKER, HOOK, PRIVILEGED, NOT_KNOWN = "CDI", "Docker", "NVIDIA's hook", "privileged", "not known"
NOWHERE: Final = "no container of that name is seen on this node"
WHICH_GPU: Final = "which GPU it is a part of is not known here"
# It opens devices by itself; NVIDIA's other hooks only finish what CDI adds.
LEGACY_HOOK: Final = "nvidia-container-runtime-hook"
_NOTHING_ASKED: Final = ("", "void", "none")
_VGPU: Final = "/vgpu"  # in the id of a share of a GPU, of GKE's device plugin
_PART: Final = "mig"  # in names of devices and resources that are parts of a GPU
_DOCKERS: Final = ("", "nvidia")  # drivers of a request that `--gpus` makes
NO_UNITS: Final[frozenset[GpuUuid]] = frozenset()

Numbers = Mapping[ContainerId, frozenset[DeviceNumber]]


class Allotment(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device that a container was given. kubelet: what the kubelet listed, or None.

    container: without an id where none of that name is seen. uuid: empty for a device of no GPU known here.
    """

    container: SeenContainer
    by: str
    uuid: GpuUuid = GpuUuid("")
    kubelet: GivenDevice | None = None
    unseen: str = ""

    @property
    def device(self) -> str:
        """Return the device's own name, by which an unknown GPU is called."""
        return (self.kubelet.id or self.kubelet.device) if self.kubelet else ""

    @property
    def claim(self) -> str:
        return self.kubelet.claim if self.kubelet else ""

    @property
    def replica(self) -> bool:
        """Return whether it is one of several shares of the device, as its id tells."""
        id_ = self.kubelet.id if self.kubelet else ""
        return REPLICA in id_ or _VGPU in id_ or (bool(self.uuid) and id_.startswith(f"{self.uuid}-"))

    @property
    def owner(self) -> PodContainer:
        return owner_of(self.container)


def owner_of(container: SeenContainer) -> PodContainer:
    """Return whose devices a container has: a pod's, whose containers may share them, or its own without a pod."""
    return (container.namespace, container.pod, "") if container.pod else ("", container.runtime, container.id)


def short_name(container: SeenContainer) -> str:
    """Return `ml/train`, or `Docker/web` for a container without a pod."""
    namespace, name = (container.namespace, container.pod) if container.pod else (container.runtime, container.name)
    return f"{shown(namespace, NAME_MAX)}/{shown(name, NAME_MAX)}"


def who(container: SeenContainer) -> str:
    """Return `ml/train, container main`, or `Docker container web`."""
    name = shown(container.name, NAME_MAX)
    return f"{short_name(container)}, container {name}" if container.pod else f"{container.runtime} container {name}"


def allotments(
    containers: Iterable[SeenContainer], given: Given, inventory: Inventory, open_: Numbers
) -> tuple[Allotment, ...]:
    """Return who was given what. open_: the numbers that containers' processes have open."""
    access, found, left = UnitAccess(inventory), list[Allotment](), dict(given.devices)
    for container in containers:
        if container.sandbox:
            continue
        names = (container.namespace, container.pod, container.name)
        listed = given.devices.get(names, ()) if container.pod else ()
        left.pop(names, None)
        numbers = open_.get(container.id, frozenset())
        found += _of_container(container, listed, access, inventory, numbers)
    for (namespace, pod, name), devices in left.items():
        nobody = SeenContainer(id=ContainerId(""), runtime="", namespace=namespace, pod=pod, name=name)
        found += filter(_may_be_gpu, _listed(nobody, devices, access, inventory))
    return tuple(found)


def _of_container(
    container: SeenContainer,
    listed: tuple[GivenDevice, ...],
    access: UnitAccess,
    inventory: Inventory,
    open_: frozenset[DeviceNumber],
) -> Iterator[Allotment]:
    """Yield what the kubelet listed for a container first, then what else it has."""
    by_kubelet = [*_listed(container, listed, access, inventory)]
    own, by = _own(container, access, inventory, open_)
    own -= frozenset(each.uuid for each in by_kubelet if each.uuid)
    if not own or by != NOT_KNOWN:  # else any driver may have given these nodes
        by_kubelet = [*filter(_may_be_gpu, by_kubelet)]
    unknown = [each for each in by_kubelet if not each.uuid]
    if unknown and not container.privileged and not any(each.kubelet and _is_part(each.kubelet) for each in unknown):
        # Their ids tell no GPU, so the container's nodes do.
        for uuid in sorted(own):
            yield Allotment(container=container, by=unknown[0].by, uuid=uuid, kubelet=unknown[0].kubelet)
        by_kubelet = [each for each in by_kubelet if each.uuid] if own else by_kubelet
        own = frozenset()
    yield from by_kubelet
    yield from (Allotment(container=container, by=by, uuid=uuid) for uuid in sorted(own))
    if not by_kubelet and not own and LEGACY_HOOK in container.hooks and container.asked not in _NOTHING_ASKED:
        yield Allotment(container=container, by=by, unseen=container.fault or "its device rules show no GPU")


def _listed(
    container: SeenContainer, devices: Iterable[GivenDevice], access: UnitAccess, inventory: Inventory
) -> Iterator[Allotment]:
    absent = "" if container.id else NOWHERE
    for device in devices:
        by, uuids = shown(device.by, NAME_MAX), access.without_cut(resolved(device, inventory))
        if _is_part(device):  # its driver names the whole GPU where NVML tells of no parts
            uuids = frozenset(each for each in uuids if each not in access.whole)
        for uuid in sorted(uuids):
            yield Allotment(container=container, by=by, uuid=uuid, kubelet=device, unseen=absent)
        if not uuids:
            yield Allotment(container=container, by=by, kubelet=device, unseen=absent or _unknown(container, inventory))


def _may_be_gpu(allotment: Allotment) -> bool:
    """Return whether what the kubelet listed may be a GPU: a claim of another driver may be a network card's."""
    device = allotment.kubelet
    names = (device.driver, *device.cdi) if device and device.driver and not allotment.uuid else ()
    return not names or any(map(is_nvidia_device, names))


def _unknown(container: SeenContainer, inventory: Inventory) -> str:
    """Return that a device is not known, with the nodes of GPUs and MIG devices by which its container has it."""
    majors = inventory.majors
    own = sorted(each for each in container.nodes if each[0] in (majors.nvidia, majors.nvidia_caps))
    nodes = [usual_node(each, majors) for each in own if each[1] < MODESET_MINOR or each[0] == majors.nvidia_caps]
    return WHICH_GPU + (f"; its container has {listed(nodes)}" if nodes else "")


def _is_part(device: GivenDevice) -> bool:
    return any(_PART in each.lower() for each in (device.id, device.device, device.resource))


def _own(
    container: SeenContainer, access: UnitAccess, inventory: Inventory, open_: frozenset[DeviceNumber]
) -> tuple[frozenset[GpuUuid], str]:
    """Return the units that a container has by itself, and by whom. The spec of a privileged one has all nodes."""
    by = _giver(container)
    if not container.privileged and (units := access.opened(container.nodes)):
        return units, by
    if units := _requested(container, access, inventory):
        return units, by
    if container.privileged:
        return access.opened(open_), PRIVILEGED
    if LEGACY_HOOK in container.hooks:
        return access.opened(open_ if container.opens is None else container.opens), by
    return frozenset(), by


def _requested(container: SeenContainer, access: UnitAccess, inventory: Inventory) -> frozenset[GpuUuid]:
    """Return the GPUs that Docker's DeviceRequests name: by UUID, by index or by CDI; -1 stands for all."""
    ids = [each for request in container.requests for each in request.ids]
    named = (GivenDevice(cdi=(each,)) if "=" in each else GivenDevice(id=each) for each in ids)
    every = any(each.count < 0 and each.driver in _DOCKERS for each in container.requests)
    return access.without_cut(
        (access.usable if every else NO_UNITS).union(*(resolved(each, inventory) for each in named))
    )


def _giver(container: SeenContainer) -> str:
    """Return who gave a container what it has by itself."""
    if container.requests:
        return CDI if any(each.driver == "cdi" for each in container.requests) else DOCKER
    if LEGACY_HOOK in container.hooks:
        return HOOK
    with_driver = bool(container.driver_versions) and not container.pod  # which `--device /dev/nvidia0` does not mount
    if container.cdi or container.hooks or with_driver:
        return CDI
    return NOT_KNOWN if container.pod else container.runtime
