"""What the NRI plugin keeps in memory: allocations of the kubelet, and what PodResources lists for this node's pods."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import REQUIRED_DESTINATION, Allocated, AllocatedDevice, PodDevices
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.kubelet.required_device import read_tokens
from nri_gpu.ledger.ledger import Entry, Ledger, Reservation
from nri_gpu.ledger.reservations import carried_over, redeem_running, reserve_for_pod
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.request.annotation import kubelet_key

PODS_MAX: Final = 1024  # sandboxes; kubelets run at most some hundreds
QUESTIONS_MAX: Final = 256  # the next List answers those that fall out


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
        # Anybody can mount something there: only a container that Allocate answered tells what the runtime does.
        if devices and self._required.issuperset(devices):
            self.unapplied = not mounted
        return mounted

    def decided(self, container: Container, decision: Decision) -> None:
        """Remember that a device plugin of the kubelet allocated the GPUs of this container."""
        allocation = container.kubelet
        if not isinstance(allocation, Allocated) or allocation.claims:
            return
        if isinstance(decision, Inject) and decision.grant.uuids:
            self._held[container.id] = allocation

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

    def ended(self, before: Ledger, after: Ledger, now: float, *, lapses: bool) -> Ledger:
        """`after` some grants hold nothing any more, with their GPUs reserved for their pods.

        lapses: as long as after Allocate; else until the pod's sandbox is gone, if it is not gone already.
        """
        if after is before:
            return after
        for id_, allocation in tuple(self._held.items()):
            old, new = before.entries.get(id_), after.entries.get(id_)
            if old is not None and new is None:
                del self._held[id_]
            if old is not None and old.holds and not (new is not None and new.holds):
                left = replace(allocation, devices=self._left(id_, allocation, after))
                after = reserve_for_pod(after, old.grant, left, now, lapses=lapses or old.pod_gone)
        return after

    def _left(self, container_id: ContainerId, allocation: Allocated, ledger: Ledger) -> tuple[AllocatedDevice, ...]:
        """What that container had and no other has: the next attempt may have come while processes of it lived."""
        others = (id_ for id_, entry in ledger.entries.items() if entry.holds and id_ != container_id)
        taken = {device for id_ in others if id_ in self._held for device in self._held[id_].devices}
        return tuple(device for device in allocation.devices if device not in taken)

    def listed(self, containers: list[Container], old: Ledger, now: float) -> tuple[Reservation, ...]:
        """Go by the containers that the runtime lists, and by those that are lost.

        Returns the reservations that stay beside them.
        """
        known = {each.id for each in containers} | old.lost.keys()
        self._held = {id_: allocation for id_, allocation in self._held.items() if id_ in known}
        self._unread = {}
        for each in containers:
            self._hold(each)
        return carried_over(old, now)

    def forget(self, ledger: Ledger) -> None:
        """Drop containers that the ledger does not have."""
        self._held = {id_: allocation for id_, allocation in self._held.items() if id_ in ledger.entries}

    def taken(self, ledger: Ledger, settings: KubeletSettings, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that our device plugin cannot allocate: others than its pods hold them, or claims, or others' pods.

        shared: sharing them does not count as holding, unless for another device plugin.
        """

        def ours(id_: ContainerId, entry: Entry) -> bool:
            allocation = self._held.get(id_)
            if allocation is not None:
                return not settings.injected(allocation.devices)
            # Of one that only the journal knows, for seconds, nobody knows whose it is. If it was the kubelet's and is
            # gone, a device that is unhealthy for that long costs the next pod its admission, for good.
            return isinstance(entry.until, float) or (shared and entry.grant.mode is Mode.SHARED)

        others = [entry.grant for id_, entry in ledger.entries.items() if entry.holds and not ours(id_, entry)]
        return frozenset[GpuUuid]().union(
            *(grant.held for grant in others),
            (
                uuid
                for claim in ledger.claims.values()
                for uuid, mode in claim.holds.items()
                if not (shared and mode is Mode.SHARED)
            ),
            *(external.held for external in ledger.external.values()),
            (device.uuid for device in settings.injected(ledger.reservations)),
        )

    def _hold(self, container: Container) -> None:
        """Remember the container's allocation; without a key, the container itself until there is one."""
        allocation = self.read(container).kubelet
        if isinstance(allocation, Allocated):
            self._held[container.id] = allocation
        elif allocation is not None and self.key is None:
            self._unread[container.id] = container


class KubeletPods:
    """Sandboxes, what the kubelet listed for them, and the sandboxes it is still to be asked about.

    settled: the kubelet's first List is here, or failed. Before that, allocations from before our start are unknown.
    questions: sandboxes to ask about, oldest first. asked: set with each new question. told: called with each answer.
    """

    def __init__(self, *, settled: bool = True, told: Callable[[Pod, PodDevices], None] | None = None) -> None:
        self.settled = settled
        self._told = told
        self.questions: deque[Pod] = deque(maxlen=QUESTIONS_MAX)
        self.asked = asyncio.Event()
        self._pods: dict[PodId, Pod] = {}
        self._by_name: dict[tuple[str, str], PodId] = {}
        self._devices: dict[PodId, PodDevices] = {}

    def add(self, pod: Pod) -> None:
        """A sandbox was created. It replaces an older one with the same name, and what was listed for that."""
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
        """What the kubelet listed for exactly this pod. None, and a question to it, where it listed nothing yet."""
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
        """The sandbox that runs under the name of a listed pod."""
        return self._pods.get(self._by_name.get((devices.namespace, devices.name), PodId("")))

    @property
    def uids(self) -> frozenset[PodUid]:
        """The pods whose sandboxes they are."""
        return frozenset(pod.uid for pod in self._pods.values())

    def all(self) -> tuple[Pod, ...]:
        return tuple(self._pods.values())

    def known(self) -> Iterator[tuple[Pod, PodDevices]]:
        """Sandboxes with what the kubelet listed for them."""
        return ((self._pods[id_], devices) for id_, devices in self._devices.items())

    def answered(self, pods: Iterable[Pod]) -> None:
        """The kubelet was asked about these and has answered: they need not be asked about again."""
        ids = {pod.id for pod in pods}
        self.questions = deque((each for each in self.questions if each.id not in ids), maxlen=QUESTIONS_MAX)

    def put(self, pod: Pod, devices: PodDevices) -> None:
        """Keep the kubelet's answer about one sandbox, if that is still the same pod's."""
        now = self._pods.get(pod.id)
        if now is not None and now.uid == pod.uid:
            self._devices[pod.id] = devices
            if self._told:
                self._told(now, devices)

    def put_list(self, pods: Iterable[Pod], listed: Iterable[PodDevices]) -> None:
        """Keep a List. pods: the sandboxes that were known when it was asked for."""
        found: dict[tuple[str, str], PodDevices | None] = {}
        for each in listed:  # two entries of one name are the old pod and the new, and nothing tells them apart
            found[each.namespace, each.name] = None if (each.namespace, each.name) in found else each
        for pod in pods:
            devices = found.get((pod.namespace, pod.name), PodDevices(pod.namespace, pod.name))
            if devices is not None:
                self.put(pod, devices)

    def ask(self, pod: Pod) -> None:
        """Ask the kubelet about it, again where it has answered."""
        if all(each.id != pod.id for each in self.questions):
            self.questions.append(pod)
        self.asked.set()
