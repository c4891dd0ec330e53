"""The NRI plugin's knowledge of the kubelet: the tokens' key, and what PodResources lists for this node's pods."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import REQUIRED_DESTINATION, Allocated, AllocatedDevice, PodDevices
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.kubelet.required_device import read_tokens
from nri_gpu.ledger.holders import Reservation
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.request.annotation import kubelet_key

PODS_MAX: Final = 1024  # sandboxes; kubelets run at most some hundreds
QUESTIONS_MAX: Final = 256  # the next List answers the questions that fall out


class KubeletTokens:
    """The tokens with which containers prove what the kubelet allocated to them."""

    def __init__(self) -> None:
        self.key: bytes | None = None  # of the tokens; None while there is none
        self.awaited = False  # there will be a key, so containers that come before it are kept
        self.unapplied = False  # the last container that was answered the required CDI device came without its edits
        self._required: set[AllocatedDevice] = set()
        self._unread: dict[ContainerId, Container] = {}

    @property
    def tells(self) -> bool:
        """Return whether tokens can be read, or will be."""
        return self.key is not None or self.awaited

    def keyed(self, key: bytes) -> Mapping[ContainerId, Allocated]:
        """Take the key. Return the allocations of the containers that came before it."""
        self.key = key
        unread, self._unread = self._unread, {}
        found = {id_: self.allocated(container) for id_, container in unread.items()}
        return {id_: allocation for id_, allocation in found.items() if allocation}

    def forget(self) -> None:
        """Forget the containers that came before the key: the runtime lists its containers anew."""
        self._unread = {}

    def allocated(self, container: Container) -> Allocated | None:
        """Return what the tokens of an existing container say, or None; without a key, keep it until there is one."""
        allocation = by_tokens(container, self.key).kubelet
        if isinstance(allocation, Allocated):
            return allocation
        if allocation is not None and self.key is None:
            self._unread[container.id] = container
        return None

    def require(self, devices: Iterable[AllocatedDevice]) -> None:
        """Remember devices with which Allocate answered the required CDI device."""
        self._required.update(devices)

    def required(self, container: Container) -> bool:
        """Return whether the required CDI device keeps this container from starting until our reply undoes it."""
        mounted, allocation = REQUIRED_DESTINATION in container.mounts, container.kubelet
        devices = allocation.devices if isinstance(allocation, Allocated) else ()
        # Anybody can mount something there: only a container that Allocate answered tells what the runtime does.
        if devices and self._required.issuperset(devices):
            self.unapplied = not mounted
        return mounted


def by_tokens(container: Container, key: bytes | None) -> Container:
    """Return the container with the allocation that its tokens carry; the same object where it has no token.

    key: of the tokens; None while there is none.
    """
    if not kubelet_key(container.annotations):
        return container
    tokens: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, value in container.annotations.items():
        (tokens if name.startswith(KUBELET_KEY) else others)[name] = value
    return replace(container, annotations=others, kubelet=read_tokens(tokens, key))


def held_by_others(
    ledger: Ledger, settings: KubeletSettings, offered: Set[AllocatedDevice] | None = None, *, shared: bool
) -> frozenset[GpuUuid]:
    """Return the GPUs the device plugin must not offer: held by annotation, claim or another component's allocation.

    The kubelet itself counts what it allocated of the devices that are offered, also where an earlier device plugin of
    that resource gave a pod's containers its GPUs. Another device of the same GPU, such as a replica from before a
    change of `replicas`, keeps no offered device from the kubelet.

    offered: by our device plugin; None: whatever the kubelet allocated, but for other plugins' resources. shared:
    sharing a GPU does not count as holding it, unless for another device plugin. Nor does it on a GPU that the kubelet
    allocated to a pod of `reservations`.
    """
    holding = [entry for entry in ledger.entries.values() if entry.holds]

    def is_counted(device: AllocatedDevice) -> bool:
        return (offered is None or device in offered) and not settings.injected((device,))

    held: list[tuple[Grant | Reservation, AllocatedDevice]] = [
        *((each, device) for device, each in ledger.reservations.items()),
        *((entry.grant, each) for entry in holding if entry.allocation for each in entry.allocation.devices),
    ]
    counted = [(holder, device) for holder, device in held if is_counted(device)]
    of_pods = {(holder.pod_id, device.uuid) for holder, device in counted if holder.pod_id}
    reserved = {device.uuid for holder, device in counted if settings.reservations.match(holder.namespace)}

    def goes_with(mode: Mode | None, uuids: Iterable[GpuUuid]) -> bool:
        return mode is Mode.SHARED and (shared or reserved.issuperset(uuids))

    def ours(entry: Entry) -> bool:
        devices = entry.allocation.devices if entry.allocation else ()
        if settings.injected(devices):
            return False
        # For some seconds a grant known only from the journal may be the kubelet's. It counts as ours: an unhealthy
        # device in that window would fail the next pod's admission permanently.
        of_kubelet = all(map(is_counted, devices)) if devices else entry.remembered
        return of_kubelet or goes_with(entry.grant.mode, entry.grant.held)

    return frozenset[GpuUuid]().union(
        *(entry.grant.held for entry in holding if not ours(entry)),
        (
            uuid
            for claim in ledger.claims.values()
            for uuid, mode in claim.holds.items()
            if not (shared and mode is Mode.SHARED)
        ),
        (
            uuid
            for external in ledger.external.values()
            for uuid in external.held
            if (external.pod_id, uuid) not in of_pods
        ),
        (
            device.uuid
            for device, each in ledger.reservations.items()
            if settings.injected((device,))
            or not (is_counted(device) or each.pod_gone or goes_with(each.mode, (device.uuid,)))
        ),
    )


class KubeletPods:
    """Sandboxes, what the kubelet listed for them, and the sandboxes that it is still to be asked about.

    told: called with each answer.
    """

    def __init__(self, *, settled: bool = True, told: Callable[[Pod, PodDevices], None] | None = None) -> None:
        # The kubelet's first List is here, or failed. Before that, allocations from before our start are unknown.
        self.settled = settled
        self.absent = False  # no socket of PodResources, or a kubelet without it, as far as was looked
        self._told = told
        self.questions: deque[Pod] = deque(maxlen=QUESTIONS_MAX)  # sandboxes to ask about, oldest first
        self.asked = asyncio.Event()  # set with each new question
        self._pods: dict[PodId, Pod] = {}
        self._by_name: dict[tuple[str, str], PodId] = {}
        self._devices: dict[PodId, PodDevices] = {}

    def add(self, pod: Pod) -> None:
        """Add a new sandbox. It replaces an older sandbox of the same name, and what was listed for that one."""
        if pod.id in self._pods:
            return
        self.remove(self._by_name.get((pod.namespace, pod.name), pod.id))
        while len(self._pods) >= PODS_MAX:
            self.remove(next(iter(self._pods)))
        self._pods[pod.id] = pod
        self._by_name[pod.namespace, pod.name] = pod.id
        self.ask(pod)

    def remove(self, pod_id: PodId) -> None:
        pod = self._pods.pop(pod_id, None)
        self._devices.pop(pod_id, None)
        if pod is not None and self._by_name.get((pod.namespace, pod.name)) == pod_id:
            del self._by_name[pod.namespace, pod.name]

    def devices_of(self, pod: Pod) -> PodDevices | None:
        """Return what the kubelet listed for exactly this pod. Where it listed nothing yet, ask it, and return None."""
        known = self._pods.get(pod.id)
        if known is None or known.uid != pod.uid:
            self.remove(pod.id)
            self.add(pod)
            return None
        devices = self._devices.get(pod.id)
        if devices is None or not devices.containers:
            self.ask(pod)
        return devices

    def sandbox_of(self, devices: PodDevices) -> Pod | None:
        """Return the sandbox that runs under the name of a listed pod, or None."""
        return self._pods.get(self._by_name.get((devices.namespace, devices.name), PodId("")))

    @property
    def uids(self) -> frozenset[PodUid]:
        """Return the UIDs of the pods whose sandboxes are known."""
        return frozenset(pod.uid for pod in self._pods.values())

    def all(self) -> tuple[Pod, ...]:
        return tuple(self._pods.values())

    def known(self) -> Iterator[tuple[Pod, PodDevices]]:
        """Return the sandboxes with what the kubelet listed for them."""
        return ((self._pods[id_], devices) for id_, devices in self._devices.items())

    def answered(self, pods: Iterable[Pod]) -> None:
        """Drop the questions about these pods: the kubelet has answered them."""
        ids = {pod.id for pod in pods}
        self.questions = deque((each for each in self.questions if each.id not in ids), maxlen=QUESTIONS_MAX)

    def put(self, pod: Pod, devices: PodDevices) -> None:
        """Keep the kubelet's answer about a sandbox, if the sandbox is still the same pod's."""
        now = self._pods.get(pod.id)
        if now is not None and now.uid == pod.uid:
            self._devices[pod.id] = devices
            if self._told:
                self._told(now, devices)

    def put_list(self, pods: Iterable[Pod], listed: Iterable[PodDevices]) -> None:
        """Keep a List. pods: the sandboxes that were known when the List was asked for."""
        found: dict[tuple[str, str], PodDevices | None] = {}
        for each in listed:  # two entries of one name are the old pod and the new pod: nothing tells them apart
            found[each.namespace, each.name] = None if (each.namespace, each.name) in found else each
        for pod in pods:
            devices = found.get((pod.namespace, pod.name), PodDevices(pod.namespace, pod.name))
            if devices is not None:
                self.put(pod, devices)

    def ask(self, pod: Pod) -> None:
        """Ask the kubelet about a pod, again where it has answered."""
        if all(each.id != pod.id for each in self.questions):
            self.questions.append(pod)
        self.asked.set()
