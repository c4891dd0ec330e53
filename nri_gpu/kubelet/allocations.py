"""What the NRI plugin keeps of the kubelet's allocations: our device plugin's, and other components'. All in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger, Reservation
from nri_gpu.allocation.reservations import (
    ListedDevice,
    Unlisted,
    carried_over,
    holders,
    reconcile,
    redeem_running,
    reserve_for_pod,
)
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import (
    REPLICA,
    REQUIRED_DESTINATION,
    Allocated,
    AllocatedDevice,
    AllocationInvalid,
    AllocationPending,
    KubeletAllocation,
    PodDevices,
    gpu_groups,
    kubelet_key,
)
from nri_gpu.domain.names import BASE_KEY, KUBELET_KEY
from nri_gpu.domain.node import Inventory
from nri_gpu.kubelet.external import (
    Listing,
    external_allocation,
    external_devices,
    is_gpu_resource,
    is_reserving,
    verified,
)
from nri_gpu.kubelet.pods import KubeletPods
from nri_gpu.kubelet.token import read_tokens
from nri_gpu.policy.kubelet import KubeletSettings

COMPLAINTS_MAX: Final = 256
JUST_STARTED: Final = (
    "nri-gpu has just started and the kubelet has not said yet which GPUs it allocated to pods (PodResources): it will "
    "be tried again in a moment"
)
NOT_ASKED: Final = "PodResources is not asked: kubelet.podresources is empty, or nri-gpu was not restarted since"


class KubeletAllocations:
    """Containers whose GPUs the kubelet allocated, and the tokens that prove it.

    key: the tokens' key; None while there is none. awaited: there will be one, so containers that come before it are
    kept. unapplied: the last container that was answered the required CDI device came without its edits.
    """

    def __init__(self) -> None:
        self.key: bytes | None = None
        self.awaited = False
        self.unapplied = False
        self._required: set[AllocatedDevice] = set()
        self._held: dict[ContainerId, Allocated] = {}
        self._unread: dict[ContainerId, Container] = {}

    def keyed(self, key: bytes, ledger: Ledger) -> None:
        """The key is there: read the tokens that came before it, of containers that the ledger still has."""
        self.key = key
        unread, self._unread = self._unread, {}
        for container in unread.values():
            if container.id in ledger.entries:
                self._hold(container)

    def read(self, container: Container) -> Container:
        """The container with the allocation that its tokens carry; the same container where it has none."""
        if not kubelet_key(container.annotations):
            return container
        tokens: dict[str, str] = {}
        others: dict[str, str] = {}
        for key, value in container.annotations.items():
            (tokens if key.startswith(KUBELET_KEY) else others)[key] = value
        return replace(container, annotations=others, kubelet=read_tokens(tokens, self.key))

    def require(self, devices: Iterable[AllocatedDevice]) -> None:
        """Allocate answered the required CDI device with these."""
        self._required.update(devices)

    def required(self, container: Container) -> bool:
        """Whether the required CDI device keeps this container from starting until our reply undoes it."""
        mounted, allocation = REQUIRED_DESTINATION in container.mounts, container.kubelet
        devices = allocation.devices if isinstance(allocation, Allocated) else ()
        if mounted or (devices and self._required.issuperset(devices)):
            self.unapplied = not mounted
        return mounted

    def decided(self, container: Container, decision: Decision) -> None:
        """Remember that the kubelet allocated the GPUs of this container."""
        if isinstance(container.kubelet, Allocated) and isinstance(decision, Inject) and decision.grant.uuids:
            self._held[container.id] = container.kubelet

    def adopt(self, container_id: ContainerId, allocation: Allocated) -> None:
        """PodResources lists these devices for a container."""
        known = self._held.get(container_id, Allocated(shared=allocation.shared))
        devices = dict.fromkeys((*known.devices, *allocation.devices))
        self._held[container_id] = Allocated(tuple(devices), known.shared)

    def started(self, ledger: Ledger, container_id: ContainerId, read: Callable[[], Container | None]) -> Ledger:
        """The ledger with that container running. read: decodes the container, which is done only if needed.

        A container that the daemon before us granted may have been in no list.
        """
        if (self.key is not None or self.awaited) and container_id not in self._held and (container := read()):
            self._hold(container)
        allocation = self._held.get(container_id)
        if allocation is None:
            return ledger
        return redeem_running(ledger, ledger.entries[container_id].grant.pod_uid, allocation)

    def ended(self, before: Ledger, after: Ledger, container_id: ContainerId, now: float) -> Ledger:
        """`after` the container ended, with its GPUs reserved for its pod."""
        entry, allocation = before.entries.get(container_id), self._held.get(container_id)
        if allocation is None:
            return after
        if container_id not in after.entries:
            del self._held[container_id]
        # A container that lapsed before it started held nothing any more.
        if entry is None or not entry.holds:
            return after
        return reserve_for_pod(after, entry.grant, allocation, now, lapses=False)

    def lapsed(self, before: Ledger, after: Ledger, now: float) -> Ledger:
        """`after` grants lapsed, with their GPUs reserved for their pods' next attempts as long as Allocate's are."""
        if after is before:
            return after
        for id_, allocation in self._held.items():
            old, new = before.entries.get(id_), after.entries.get(id_)
            if old is not None and old.holds and new is not None and not new.holds:
                after = reserve_for_pod(after, old.grant, allocation, now)
        return after

    def pod_gone(self, before: Ledger, after: Ledger, now: float) -> Ledger:
        """`after` a sandbox went, with its GPUs reserved for a while: the kubelet may be making the pod another one."""
        for id_ in before.entries.keys() - after.entries.keys():
            allocation = self._held.pop(id_, None)
            if allocation is not None and before.entries[id_].holds:
                after = reserve_for_pod(after, before.entries[id_].grant, allocation, now)
        return after

    def listed(self, containers: list[Container], old: Ledger, now: float) -> tuple[Reservation, ...]:
        """Start over from the containers that the runtime lists. Returns the reservations that stay beside them."""
        self._held, self._unread = {}, {}
        for each in containers:
            self._hold(each)
        return carried_over(old, now)

    def forget(self, ledger: Ledger) -> None:
        """Drop containers that the ledger does not have."""
        self._held = {id_: allocation for id_, allocation in self._held.items() if id_ in ledger.entries}

    def taken(self, ledger: Ledger, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold. shared: sharing them does not count as holding."""
        return frozenset(
            uuid
            for uuid, use in ledger.usage().items()
            if use.external
            or any(
                not (id_ in self._held or (shared and grant.mode is Mode.SHARED)) for id_, grant in use.grants.items()
            )
        )

    def _hold(self, container: Container) -> None:
        """Remember the container's allocation; without a key, the container itself until there is one."""
        allocation = self.read(container).kubelet
        if isinstance(allocation, Allocated):
            self._held[container.id] = allocation
        elif allocation is not None and self.key is None:
            self._unread[container.id] = container


class ExternalAllocations:
    """Allocations by other device plugins and schedulers, as PodResources lists them.

    pods: None where PodResources is not asked; then nothing is known.
    """

    def __init__(self) -> None:
        self.pods: KubeletPods | None = None
        self._unlisted = Unlisted()
        self._held: set[ContainerId] = set()
        self._complaints: dict[tuple[str, str, str], None] = {}

    def concerns(self, payload: bytes, settings: KubeletSettings) -> bool:
        """Whether PodResources lists devices for the pod of this request that the request itself does not show."""
        if self.pods is None or not settings.inject_for.patterns:
            return False
        known = self.pods.known()
        return any(pod.uid.encode() in payload for pod, each in known if external_devices(each.devices, settings))

    def read(self, container: Container, inventory: Inventory, settings: KubeletSettings) -> Container:
        """The container with its external allocation, or with the fault of its own token; else the same container."""
        if self.pods is None and not settings.injects_external:
            return container
        listing = self._listing(container, settings)
        if container.kubelet is not None:
            allocation: KubeletAllocation | None = verified(container.kubelet, container, listing, settings)
        else:
            allocation = external_allocation(container, listing, inventory, settings)
            if isinstance(allocation, AllocationPending) and self.pods is None:
                allocation = AllocationPending(NOT_ASKED, allocation.key)
            if allocation is None and container.pod.annotations and self.pods is not None and not self.pods.settled:
                allocation = AllocationPending(JUST_STARTED, BASE_KEY)
        return container if allocation is container.kubelet else replace(container, kubelet=allocation)

    def decided(self, container: Container, decision: Decision, settings: KubeletSettings) -> None:
        """Remember that another device plugin allocated the GPUs of this container."""
        if not (isinstance(container.kubelet, Allocated) and isinstance(decision, Inject)):
            return
        if external_devices(container.kubelet.devices, settings):
            self._held.add(container.id)

    def complain(self, container: Container) -> None:
        """Log a fault of the container's allocation, once for each container of a pod."""
        allocation = container.kubelet
        if not isinstance(allocation, AllocationInvalid):
            return
        about = (container.pod.uid, container.name, allocation.fault)
        if about in self._complaints:
            return
        while len(self._complaints) >= COMPLAINTS_MAX:
            del self._complaints[next(iter(self._complaints))]
        self._complaints[about] = None
        bound_ = logger.bind(namespace=container.pod.namespace, pod_name=container.pod.name, fault=allocation.fault)
        bound_.bind(container_name=container.name).warning("kubelet allocation not valid")

    def taken(self, ledger: Ledger, settings: KubeletSettings) -> frozenset[GpuUuid]:
        """GPUs that other device plugins allocated, so that ours cannot."""
        if not settings.inject_for.patterns:
            return frozenset()
        self._held &= ledger.entries.keys()
        held = (ledger.entries[id_] for id_ in self._held)
        granted = {uuid for entry in held if entry.holds for uuid in entry.grant.uuids}
        return frozenset(granted) | {device.uuid for device in external_devices(ledger.reservations, settings)}

    def reconcile(
        self,
        ledger: Ledger,
        listed: tuple[PodDevices, ...],
        settings: KubeletSettings,
        now: float,
        adopt: Callable[[ContainerId, Allocated], None],
    ) -> Ledger:
        """The ledger with reservations as a List of PodResources has them. adopt: told the containers it names."""
        named = tuple(self._named(listed, settings))
        for each in named:
            for id_ in holders(ledger, each):
                adopt(id_, Allocated((each.device,), each.shared))
                if external_devices((each.device,), settings):
                    self._held.add(id_)
        about = [device for device in ledger.reservations if is_gpu_resource(device, settings)]
        ledger, self._unlisted = reconcile(ledger, named, about, self._unlisted, now)
        return ledger

    def synchronized(
        self,
        containers: Iterable[Container],
        settings: KubeletSettings,
        adopt: Callable[[ContainerId, Allocated], None],
    ) -> None:
        """Take over the runtime's list: sandboxes to ask about, and pods that share GPUs which a scheduler reserved."""
        for container in containers:
            if self.pods is not None and container.pod.name != "?":  # the runtime did not list that pod
                self.pods.add(container.pod)
            if settings.reservations.patterns and gpu_groups(container.pod.labels):
                adopt(container.id, Allocated(shared=True))

    def _named(self, listed: tuple[PodDevices, ...], settings: KubeletSettings) -> Iterator[ListedDevice]:
        for pod in listed:
            sandbox = self.pods.sandbox_of(pod) if self.pods else None
            for container in pod.containers:
                for device in container.devices:
                    if is_gpu_resource(device, settings):
                        shared = REPLICA in device.id or is_reserving(pod.namespace, settings)
                        yield ListedDevice(device, pod.namespace, pod.name, container.name, shared, sandbox)

    def _listing(self, container: Container, settings: KubeletSettings) -> Listing:
        if self.pods is None:
            return Listing()
        return Listing(self.pods.devices_of(container.pod), self._reserved(self.pods, settings))

    def _reserved(self, pods: KubeletPods, settings: KubeletSettings) -> Mapping[GpuUuid, frozenset[str]]:
        """GPUs that reservation pods hold -> the GPU groups of those pods."""
        found: dict[GpuUuid, frozenset[str]] = {}
        if not settings.reservations.patterns:
            return found
        for pod, listed in pods.known():
            if is_reserving(pod.namespace, settings):
                for device in listed.devices:
                    if is_gpu_resource(device, settings):
                        found[device.uuid] = found.get(device.uuid, frozenset()) | gpu_groups(pod.labels)
        return found
