"""The NRI half of the kubelet's device plugin: reads what the kubelet gave, and keeps it for the pod. All in memory."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, Ledger
from nri_gpu.allocation.promises import bound, carried, is_promise
from nri_gpu.allocation.token import read_tokens
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import HANDED_KEY, KubeletGrant, handed_key


class KubeletHalf:
    """What the plugin asks about containers with the kubelet's tokens. key: the tokens'; None while there is none."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        self._held: dict[ContainerId, KubeletGrant] = {}

    def read(self, container: Container) -> Container:
        """The container with what the kubelet gave it; the very same one where it gave nothing."""
        if not handed_key(container.annotations):
            return container
        tokens: dict[str, str] = {}
        others: dict[str, str] = {}
        for key, value in container.annotations.items():
            (tokens if key.startswith(HANDED_KEY) else others)[key] = value
        return replace(container, annotations=others, kubelet=read_tokens(tokens, self.key))

    def decided(self, container: Container, decision: Decision) -> None:
        """Remember whose GPUs came by the kubelet."""
        if container.kubelet is not None and isinstance(decision, Inject) and decision.grant.uuids:
            self._held[container.id] = container.kubelet

    def adopt(self, container_id: ContainerId, given: KubeletGrant) -> None:
        """Its GPUs came by the kubelet, as somebody else found out."""
        known = self._held.get(container_id, KubeletGrant(shared=given.shared))
        devices = dict.fromkeys((*known.devices, *given.devices))
        self._held[container_id] = KubeletGrant(tuple(devices), known.shared)

    def started(self, container_id: ContainerId, read: Callable[[], Container | None]) -> None:
        """One that was granted by a daemon before us may have been in no list. read: dear, so only where it matters."""
        if self.key is None or container_id in self._held or (container := read()) is None:
            return
        given = self.read(container).kubelet
        if given is not None and not given.fault:
            self._held[container_id] = given

    def ended(self, before: Ledger, after: Ledger, container_id: ContainerId) -> Ledger:
        """With its GPUs kept for its pod."""
        entry, given = before.entries.get(container_id), self._held.get(container_id)
        if given is None:
            return after
        if container_id not in after.entries:
            del self._held[container_id]
        return after if entry is None else bound(after, entry.grant, given)

    def listed(self, containers: list[Container], old: Ledger, now: float) -> tuple[Entry, ...]:
        """Start over from what the runtime lists. Returns what stays promised beyond it."""
        given = ((each.id, self.read(each).kubelet) for each in containers)
        self._held = {id_: grant for id_, grant in given if grant is not None and not grant.fault}
        return carried(old, now)

    def forget(self, ledger: Ledger) -> None:
        """What the ledger does not know is over."""
        if self._held:
            self._held = {id_: given for id_, given in self._held.items() if id_ in ledger.entries}

    def taken(self, ledger: Ledger, *, shared: bool) -> frozenset[GpuUuid]:
        """GPUs that others than the kubelet's pods hold, so that it cannot give them. shared: nor share them."""
        return frozenset(
            uuid
            for uuid, use in ledger.usage().items()
            if use.foreign
            or any(
                not (is_promise(id_) or id_ in self._held or (shared and grant.mode is Mode.SHARED))
                for id_, grant in use.grants.items()
            )
        )
