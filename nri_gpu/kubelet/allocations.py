"""The NRI half of the kubelet's device plugin: reads what the kubelet gave, and keeps it for the pod. All in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, Ledger
from nri_gpu.allocation.reservations import bound, carried, is_promise, outlived, resumed
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, AllocatedDevice, KubeletAllocation, kubelet_key
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.kubelet.token import read_tokens


class KubeletAllocations:
    """What the plugin asks about containers with the kubelet's tokens.

    key: the tokens'; None while there is none. awaited: there will be one, so containers that come before it are kept.
    """

    def __init__(self) -> None:
        self.key: bytes | None = None
        self.awaited = False
        self.unapplied = False  # the last container that was answered a CDI device came without its edits
        self._required: set[AllocatedDevice] = set()
        self._held: dict[ContainerId, KubeletAllocation] = {}
        self._unread: dict[ContainerId, Container] = {}

    def keyed(self, key: bytes, ledger: Ledger) -> None:
        """The key is there: what came before it can be read. ledger: without what is over meanwhile."""
        self.key = key
        unread, self._unread = self._unread, {}
        for container in unread.values():
            if container.id in ledger.entries:
                self._hold(container)

    def read(self, container: Container) -> Container:
        """The container with what the kubelet gave it; the very same one where it gave nothing."""
        if not kubelet_key(container.annotations):
            return container
        tokens: dict[str, str] = {}
        others: dict[str, str] = {}
        for key, value in container.annotations.items():
            (tokens if key.startswith(KUBELET_KEY) else others)[key] = value
        return replace(container, annotations=others, kubelet=read_tokens(tokens, self.key))

    def requires(self, devices: Iterable[AllocatedDevice]) -> None:
        """Allocate answered the CDI device beside these."""
        self._required.update(devices)

    def required(self, container: Container) -> bool:
        """Whether that device holds it back until our reply."""
        there, given = REQUIRED_DESTINATION in container.mounts, container.kubelet
        if there or (given is not None and given.devices and self._required.issuperset(given.devices)):
            self.unapplied = not there
        return there

    def decided(self, container: Container, decision: Decision) -> None:
        """Remember whose GPUs came by the kubelet."""
        if container.kubelet is not None and isinstance(decision, Inject) and decision.grant.uuids:
            self._held[container.id] = container.kubelet

    def adopt(self, container_id: ContainerId, given: KubeletAllocation) -> None:
        """Its GPUs came by the kubelet, as somebody else found out."""
        known = self._held.get(container_id, KubeletAllocation(shared=given.shared))
        devices = dict.fromkeys((*known.devices, *given.devices))
        self._held[container_id] = KubeletAllocation(tuple(devices), known.shared)

    def started(self, ledger: Ledger, container_id: ContainerId, read: Callable[[], Container | None]) -> Ledger:
        """With that container running. read: dear, so only where it matters.

        One that was granted by a daemon before us may have been in no list.
        """
        if (self.key is not None or self.awaited) and container_id not in self._held and (container := read()):
            self._hold(container)
        given = self._held.get(container_id)
        return ledger if given is None else resumed(ledger, ledger.entries[container_id].grant.pod_uid, given)

    def ended(self, before: Ledger, after: Ledger, container_id: ContainerId, now: float) -> Ledger:
        """With its GPUs kept for its pod."""
        entry, given = before.entries.get(container_id), self._held.get(container_id)
        if given is None:
            return after
        if container_id not in after.entries:
            del self._held[container_id]
        # One that never started and lapsed had nothing any more that could be kept.
        return bound(after, entry.grant, given, now, for_life=True) if entry is not None and entry.holds else after

    def lapsed(self, before: Ledger, after: Ledger, now: float) -> Ledger:
        """With what containers that never started had kept for their pods' next attempts, for as long as Allocate's."""
        if after is before:
            return after
        for id_, given in self._held.items():
            entry, now_ = before.entries.get(id_), after.entries.get(id_)
            if entry is not None and entry.holds and now_ is not None and not now_.holds:
                after = bound(after, entry.grant, given, now)
        return after

    def pod_gone(self, before: Ledger, after: Ledger, now: float) -> Ledger:
        """With what a sandbox's containers had kept for a while: the kubelet may be making its pod another one."""
        for id_ in before.entries.keys() - after.entries.keys():
            given = self._held.pop(id_, None)
            if given is not None and before.entries[id_].holds:
                after = bound(after, before.entries[id_].grant, given, now)
        return outlived(before, after, now)

    def listed(self, containers: list[Container], old: Ledger, now: float) -> tuple[Entry, ...]:
        """Start over from what the runtime lists. Returns what stays promised beyond it."""
        self._held, self._unread = {}, {}
        for each in containers:
            self._hold(each)
        return carried(old, now)

    def _hold(self, container: Container) -> None:
        """Remember that its GPUs came by the kubelet, if they did; and where that cannot be told yet, itself."""
        given = self.read(container).kubelet
        if given is None:
            return
        if not given.fault:
            self._held[container.id] = given
        elif self.key is None:
            self._unread[container.id] = container

    def forget(self, ledger: Ledger) -> None:
        """What the ledger does not know is over."""
        if self._held:
            self._held = {id_: given for id_, given in self._held.items() if id_ in ledger.entries}

    def taken(self, ledger: Ledger, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold, so that it cannot give them. shared: nor share them."""
        return frozenset(
            uuid
            for uuid, use in ledger.usage().items()
            if use.external
            or any(
                not (is_promise(id_) or id_ in self._held or (shared and grant.mode is Mode.SHARED))
                for id_, grant in use.grants.items()
            )
        )
