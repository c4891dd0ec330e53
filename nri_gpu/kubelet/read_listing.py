"""GPUs that another device plugin, or a scheduler of GPU fractions, allocated to a container that we inject for.

NVIDIA_VISIBLE_DEVICES alone grants nothing: images set it, and so can whoever creates a pod. The kubelet's PodResources
decides; the variable has to agree with it, since both come from one Allocate.

    PodResources lists devices for the container    variable names them, or is not set    -> these
                                                    it names others, or all               -> refused
                                                    void, none                            -> nothing, as it says
    PodResources lists none for it                  any value                             -> nothing
    PodResources has not answered, or has no pod    names devices                         -> refused for now

Our own resource can have been NVIDIA's device plugin's before. The kubelet keeps the answer of that time for each start
of the pod's containers, and no token of ours is in it. There PodResources alone decides, as our token would:

    PodResources lists our resource for it          any value                             -> these, if the node has them
    PodResources lists none for it                  any value                             -> as if it were not asked
    PodResources has not answered, or has no pod    names units of this node              -> refused for now
    PodResources is not served                      any value                             -> as if it were not asked
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.decision.foreign import GPU_NODE, nvidia_names
from nri_gpu.domain.allocation import (
    FRACTION,
    FRACTION_MIB,
    GROUP,
    REPLICA,
    Allocated,
    AllocatedDevice,
    AllocationInvalid,
    AllocationPending,
    DynamicDevice,
    KubeletAllocation,
    PodDevices,
    gpu_groups,
)
from nri_gpu.domain.container import Container, Pod, PodId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import BASE_KEY, KUBELET_KEY
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import clipped
from nri_gpu.domain.text import listed as listed_names
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.ledger.events import ListedDevice, Reconciled
from nri_gpu.ledger.holders import DriverDevice
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.prepared import VFIO, gpu_of, minor_of
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.request.annotation import our_keys
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE, named_devices
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import LogOnce

SHOWN_MAX: Final = 3  # names in a sentence
NAME_MAX: Final = 80  # characters
NO_ANSWER_YET: Final = (
    "it names GPUs as a device plugin does, and the kubelet has not said yet whether it allocated any to this "
    "container (PodResources): it will be tried again; if this lasts, see the log of `nri-gpu run`"
)
# A kubelet that has just restarted does not know its pods yet, so this is no final answer either.
NO_SUCH_POD: Final = (
    "it names GPUs as a device plugin does, and the kubelet knows of no such pod (PodResources): it will be tried "
    "again; a pod that was created past the kubelet has to leave that variable out"
)
TWO_PLUGINS: Final = (
    "the kubelet allocated to this container GPUs of nri-gpu's own resource and of another device plugin's: ask for "
    "one of the two in resources.limits"
)
TWO_MODES: Final = "the kubelet allocated shared and unshared GPUs to it at once: ask for one kind"

_FRACTION: Final = "fraction-"
COMPLAINTS_MAX: Final = 256
JUST_STARTED: Final = (
    "nri-gpu has just started and the kubelet has not said yet which GPUs it allocated to pods (PodResources): it will "
    "be tried again in a moment"
)
NOT_ASKED: Final = "PodResources is not asked: kubelet.podresources is empty, or nri-gpu was not restarted since"


class Listing(Struct, frozen=True):
    """The answer of PodResources."""

    pod: PodDevices | None = None  # about the container's pod; None while there is no answer
    # GPUs that pods in reservation namespaces hold -> the GPU groups of those pods.
    reserved: Mapping[GpuUuid, frozenset[str]] = {}
    settled: bool = True  # as in `KubeletPods`
    absent: bool = False  # likewise


def by_listing(
    container: Container, listing: Listing | None, inventory: Inventory, settings: KubeletSettings
) -> Container:
    """Add a container's external allocation, or the fault of its own token; else return the same object.

    listing: None where PodResources is not asked.
    """
    if listing is None and not settings.injects_external:
        return container
    told = listing or Listing()
    if container.kubelet is not None and not _is_taken_over(container, told, settings):
        allocation: KubeletAllocation | None = verified(container.kubelet, container, told, settings)
    else:
        allocation = external_allocation(container, told, inventory, settings)
        if isinstance(allocation, AllocationPending) and listing is None:
            allocation = AllocationPending(NOT_ASKED, allocation.key)
        if allocation is None and our_keys(container.pod.annotations) and not told.settled:
            allocation = AllocationPending(JUST_STARTED, BASE_KEY)
    if (
        isinstance(allocation, Allocated)
        and allocation.devices
        and not allocation.claims
        and settings.reservations.match(container.pod.namespace)
    ):
        allocation = replace(allocation, shared=True)  # a pod that reserves a GPU holds it shared
    return container if allocation is container.kubelet else replace(container, kubelet=allocation)


def _is_taken_over(container: Container, told: Listing, settings: KubeletSettings) -> bool:
    """Return whether the resource by which we allocated to a container is another plugin's by now, for which we inject.

    Its token is from when our device plugin was on, and cannot be read: what PodResources lists for it counts.
    """
    allocation, listed = container.kubelet, told.pod.container(container.name) if told.pod else None
    unread = isinstance(allocation, AllocationInvalid) and allocation.key == KUBELET_KEY and not settings.enabled
    return bool(unread and listed and settings.injected(listed.devices))


def external_allocation(
    container: Container, listing: Listing, inventory: Inventory, settings: KubeletSettings
) -> KubeletAllocation | None:
    """Return what other components allocated to the container and we inject; None if nothing, or not ours to inject."""
    if not settings.reads_variable or injected_by_others(container):
        return None
    names = named_devices(container.env.get(VARIABLE, ""))
    if _is_fraction(container.pod, names, settings):
        return _fraction(container, names, listing, inventory)
    found = _before_us(container, names, listing, inventory, settings) if settings.enabled else None
    if found is None and settings.inject_for.patterns:
        return _of_plugin(container, names, listing, inventory, settings)
    return found


def verified(
    allocation: KubeletAllocation, container: Container, listing: Listing, settings: KubeletSettings
) -> KubeletAllocation:
    """Check an allocation read from our own tokens: it becomes a fault where PodResources contradicts it."""
    listed = listing.pod.container(container.name) if listing.pod else None
    if not isinstance(allocation, Allocated) or listed is None:
        return allocation
    theirs = settings.injected(listed.devices)
    # Another plugin may have taken over a resource by which ours gave these very devices.
    if theirs and (named_devices(container.env.get(VARIABLE, "")) or not set(allocation.devices).issuperset(theirs)):
        return AllocationInvalid(TWO_PLUGINS)
    if allocation.claims:  # not of a device plugin
        return allocation
    for resource in dict.fromkeys(each.resource for each in allocation.devices):
        signed = frozenset(each.id for each in allocation.devices if each.resource == resource)
        if signed != (told := listed.of(resource)):
            return AllocationInvalid(
                f"the kubelet says that it allocated {_shown(told) or 'none'} of {resource} to this container, "
                f"and not {_shown(signed)}, which its annotation carries: the annotation was copied from another "
                "container; delete the pod to have the kubelet allocate again"
            )
    return allocation


def injected_by_others(container: Container) -> bool:
    """Return whether the container already has GPU nodes, CDI devices of NVIDIA's kinds or NVIDIA's hooks."""
    nodes = not container.privileged and any(GPU_NODE.fullmatch(each.path) for each in container.devices)
    return nodes or bool(nvidia_names(container)) or bool(container.nvidia_hooks)


def is_gpu_resource(device: AllocatedDevice, settings: KubeletSettings) -> bool:
    """Return whether the device is of a resource of GPUs: our own, or another plugin's that we inject."""
    return bool(settings.injected((device,))) or (settings.enabled and settings.is_own(device.resource))


def _before_us(
    container: Container, names: tuple[str, ...], listing: Listing, inventory: Inventory, settings: KubeletSettings
) -> KubeletAllocation | None:
    """Return what the kubelet allocated of our own resource while another plugin served it, or None if nothing.

    The variable tells only whose a plain init container's devices are, and whom an answer matters to.
    """
    named, unknown = _units(names, container, inventory)
    if listing.pod is None or not listing.pod.containers:
        may_name = named or (unknown and inventory.fault and not inventory.gpus)
        if listing.absent or not may_name:
            return None
        return _not_yet(NO_ANSWER_YET if listing.pod is None else NO_SUCH_POD)
    listed = listing.pod.container(container.name)
    devices = listed.devices if listed else tuple(each for each in listing.pod.devices if each.uuid in named)
    ours = tuple(each for each in devices if is_gpu_resource(each, settings) and not settings.injected((each,)))
    if not ours:
        return None
    if settings.injected(devices):
        return AllocationInvalid(TWO_PLUGINS, VARIABLE)
    if listed is None and (unknown or named != {each.uuid for each in ours}):
        return _differs(container, ours)
    return _allocated(ours, inventory, clipped(ours[0].resource, NAME_MAX))


def without_unnamed(ledger: Ledger, settings: KubeletSettings) -> Ledger:
    """Return a ledger without reservations of resources that policy no longer names: nobody would tell of their end."""
    return ledger.without_reservations(
        device
        for device in ledger.reservations
        if not (is_gpu_resource(device, settings) or (settings.reservations.patterns and _of_fraction(device)))
    )


def _of_plugin(
    container: Container, names: tuple[str, ...], listing: Listing, inventory: Inventory, settings: KubeletSettings
) -> KubeletAllocation | None:
    if listing.pod is None or not listing.pod.containers:
        return _not_yet(NO_ANSWER_YET if listing.pod is None else NO_SUCH_POD) if names else None
    named, unknown = _units(names, container, inventory)
    if unknown and not inventory.gpus:
        return _not_yet(f"the GPUs that it names are not known yet: {inventory.fault or 'this node has no GPU'}")
    listed = listing.pod.container(container.name)
    if listed is None:  # a plain init container: the kubelet gives its devices to the pod's later containers
        devices = tuple(each for each in settings.injected(listing.pod.devices) if each.uuid in named)
    else:
        devices = settings.injected(listed.devices)
    if not devices:
        return Allocated(key=VARIABLE) if names else None
    if VARIABLE in container.env and not names and "all" not in container.env[VARIABLE].split(","):
        return Allocated(key=VARIABLE)  # void, none
    if VARIABLE in container.env and (unknown or named != {each.uuid for each in devices}):
        return _differs(container, devices)
    return _allocated(devices, inventory, VARIABLE)


def _differs(container: Container, devices: Iterable[AllocatedDevice]) -> AllocationInvalid:
    return AllocationInvalid(
        f"it says {clipped(container.env[VARIABLE], NAME_MAX)}, and the kubelet allocated "
        f"{_shown(each.id for each in devices)} to this container: take the variable out of the pod's own environment",
        key=VARIABLE,
    )


def _allocated(devices: tuple[AllocatedDevice, ...], inventory: Inventory, key: str) -> KubeletAllocation:
    """Return the allocation of what PodResources lists, or why it is none: an id can be anything, an index too."""
    here = {unit.uuid for unit in inventory.units}
    if gone := [each.id for each in devices if each.uuid not in here]:
        if not inventory.gpus:
            why = inventory.fault or "this node has no GPU"
            return AllocationPending(f"the GPUs that the kubelet allocated to it are not known yet: {why}", key)
        return AllocationInvalid(
            f"the kubelet allocated {_shown(gone)} of {clipped(devices[0].resource, NAME_MAX)} to this container, and "
            "this node has no such GPU or MIG device (see `nri-gpu gpus` there): delete the pod to have the kubelet "
            "allocate again",
            key,
        )
    replicas = {REPLICA in each.id for each in devices}
    if len(replicas) > 1:
        return AllocationInvalid(TWO_MODES, key)
    return Allocated(devices, replicas.pop(), key=key)


def _is_fraction(pod: Pod, names: tuple[str, ...], settings: KubeletSettings) -> bool:
    if not names or not settings.reservations.patterns or settings.reservations.match(pod.namespace):
        return False
    return bool(gpu_groups(pod.labels))


def _fraction(
    container: Container, names: tuple[str, ...], listing: Listing, inventory: Inventory
) -> KubeletAllocation | None:
    groups = gpu_groups(container.pod.labels)
    named, unknown = _units(names, container, inventory)
    lacking = [*unknown, *sorted(uuid for uuid in named if listing.reserved.get(uuid, frozenset()).isdisjoint(groups))]
    if lacking:
        return _not_yet(
            f"it names {_shown(lacking)}, which no pod in the namespaces of kubelet.reservations holds for this pod's "
            f"GPU group ({GROUP}): it will be tried again, since the kubelet may not have answered yet"
        )
    # A resource of its own for each pod: what the reservation pod holds stays that pod's.
    resource = f"{_FRACTION}{container.pod.uid}"
    devices = tuple(AllocatedDevice(resource, uuid) for uuid in sorted(named))
    return Allocated(devices, shared=True, key=VARIABLE, part=_part(container.pod.annotations, named, inventory))


def _part(annotations: Mapping[str, str], uuids: Set[GpuUuid], inventory: Inventory) -> float:
    """Return which part of each of these GPUs a pod asked its scheduler for; 1 if that is not understood."""
    memory_bytes = min((unit.memory_bytes or 0 for unit in inventory.units if unit.uuid in uuids), default=0)
    try:
        if FRACTION in annotations:
            part = float(annotations[FRACTION])
        else:
            part = int(annotations[FRACTION_MIB]) * (1 << 20) / memory_bytes
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        return 1.0
    return part if 0 < part < 1 else 1.0


def _of_fraction(device: AllocatedDevice) -> bool:
    """Return whether a scheduler of fractions allocated the device: the kubelet lists it for no pod."""
    return device.resource.startswith(_FRACTION)


def _units(
    names: tuple[str, ...], container: Container, inventory: Inventory
) -> tuple[frozenset[GpuUuid], tuple[str, ...]]:
    """Find the GPUs and MIG devices with these names (UUIDs or indices). Return them, and the unknown names."""
    if names == (MOUNTED_NAMES,):
        below = f"{MOUNTED_NAMES}/"
        names = tuple(each.removeprefix(below) for each in container.mounts if each.startswith(below))
        names = tuple(each for each in names if not each.startswith("imex/"))
    known: dict[str, GpuUuid] = {unit.uuid: unit.uuid for unit in inventory.units}
    known |= {unit.place: unit.uuid for unit in inventory.units}
    return (
        frozenset(known[name] for name in names if name in known),
        tuple(sorted(name for name in names if name not in known)),
    )


def _not_yet(sentence: str) -> AllocationPending:
    return AllocationPending(sentence, VARIABLE)


def _shown(names: Iterable[str]) -> str:
    return listed_names((clipped(each, NAME_MAX) for each in sorted(names)), SHOWN_MAX)


class ExternalAllocations:
    """Allocations by other device plugins and schedulers, as PodResources lists them.

    pods: None where PodResources is not asked; then nothing is known.
    """

    def __init__(self, state: NodeState) -> None:
        self.pods: KubeletPods | None = None
        self.node = ""  # the name of this node, which its pool has in NVIDIA's driver; empty while it is not known
        self._state = state
        self._odd = LogOnce()
        self._complaints: deque[tuple[str, str, str]] = deque(maxlen=COMPLAINTS_MAX)

    @property
    def _settings(self) -> KubeletSettings:
        return self._state.settings.kubelet

    def concerns(self, payload: bytes) -> bool:
        """Return whether PodResources lists devices for a request's pod that the request itself does not show."""
        if self.pods is None:
            return False
        pods = (each for pod, each in self.pods.known() if each.devices and pod.uid.encode() in payload)
        return any(is_gpu_resource(device, self._settings) for each in pods for device in each.devices)

    def listing(self, pod: Pod) -> Listing | None:
        """Return what PodResources says of a container's pod, which is asked where it has said nothing yet.

        None where it is not asked at all.
        """
        if self.pods is None:
            return None
        pods = self.pods
        return Listing(pods.devices_of(pod), self._reserved(pods, self._settings), pods.settled, pods.absent)

    def complain(self, container: Container) -> None:
        """Log a fault of the container's allocation, once for each container of a pod."""
        allocation = container.kubelet
        if not isinstance(allocation, AllocationInvalid):
            return
        about = (container.pod.uid, container.name, allocation.fault)
        if about in self._complaints:
            return
        self._complaints.append(about)
        bound = logger.bind(namespace=container.pod.namespace, pod_name=container.pod.name, fault=allocation.fault)
        bound.bind(container_name=container.name).warning("kubelet allocation not valid")

    def reconciled(self, listed: tuple[PodDevices, ...], now: float) -> Reconciled:
        """Make the ledger's event of a List of PodResources, which tells of every resource."""
        about = frozenset(device for device in self._state.ledger.reservations if not _of_fraction(device))
        self._warn_of_odd(listed)
        sandbox_of = self.pods.sandbox_of if self.pods else lambda _: None
        prepared = (device for pod in listed for device in self.prepared(pod, sandbox_of(pod)))
        return Reconciled(now, tuple(self._named(listed)), about, tuple(prepared))

    def prepared(self, listed: PodDevices, pod: Pod | None) -> Iterator[DriverDevice]:
        """Yield the devices that NVIDIA's DRA driver prepared for a pod, as far as they can be GPUs of this node.

        pod: its sandbox, where that is known.
        """
        for container in listed.containers:
            for each in container.prepared:
                if not self._odd_pool(each) and minor_of(each.device) is not None:
                    yield DriverDevice(
                        device=each.device,
                        namespace=listed.namespace,
                        pod_name=listed.name,
                        container_name=container.name,
                        pod_id=pod.id if pod else PodId(""),
                    )

    def _odd_pool(self, device: DynamicDevice) -> bool:
        return bool(self.node) and device.pool != self.node

    def _warn_of_odd(self, listed: tuple[PodDevices, ...]) -> None:
        """Log which listed devices of NVIDIA's DRA driver are no GPU of this node, when these are other ones."""
        inventory = self._state.node.inventory
        devices = {each for pod in listed for container in pod.containers for each in container.prepared}
        odd = {
            f"{each.pool}/{each.device}"
            for each in devices
            if self._odd_pool(each)
            or (inventory.gpus and not (gpu_of(each.device, inventory) or VFIO.fullmatch(each.device)))
        }
        self._odd.warning(
            "PodResources names devices of gpu.nvidia.com that this node does not have", _shown(odd) if odd else ""
        )

    def synchronized(self, containers: Iterable[Container]) -> None:
        """Take over the sandboxes of the runtime's list, to ask about them."""
        for container in containers:
            if self.pods is not None and container.pod.name != "?":  # the runtime did not list that pod
                self.pods.add(container.pod)

    def _named(self, listed: tuple[PodDevices, ...]) -> Iterator[ListedDevice]:
        settings, reserved = self._settings, self._state.ledger.reservations
        for pod in listed:
            sandbox = self.pods.sandbox_of(pod) if self.pods else None
            for container in pod.containers:
                for device in container.devices:
                    if is_gpu_resource(device, settings) or (device in reserved and sandbox):
                        shared = REPLICA in device.id or settings.reservations.match(pod.namespace)
                        yield ListedDevice(device, pod.namespace, pod.name, container.name, shared, sandbox)

    def _reserved(self, pods: KubeletPods, settings: KubeletSettings) -> Mapping[GpuUuid, frozenset[str]]:
        """Map GPUs that reservation pods hold to the GPU groups of those pods."""
        found: dict[GpuUuid, frozenset[str]] = {}
        if not settings.reservations.patterns:
            return found
        for pod, listed in pods.known():
            if settings.reservations.match(pod.namespace):
                for device in listed.devices:
                    if is_gpu_resource(device, settings):
                        found[device.uuid] = found.get(device.uuid, frozenset()) | gpu_groups(pod.labels)
        return found
