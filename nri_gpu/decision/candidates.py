"""Between policy and allocation: which GPUs a container is offered, and whether those chosen for it are too many.

Pure, as `decide` is; everything here counts in the ledger's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.allocation.ledger import UNUSED, Ledger
from nri_gpu.allocation.messages import called, fitting_gpus
from nri_gpu.decision.mps import seat_fault
from nri_gpu.domain.claim import Claim, Count, MigProfiles, Mode
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, Unit
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.limits import NO_LIMITS, Holdings, counts_holders, excesses
from nri_gpu.policy.pools import Pool
from nri_gpu.policy.select import Terms
from nri_gpu.policy.text import quoted

_POOLS_SHOWN: Final = 3


class Bidder(Struct, frozen=True):
    """Who asks, in which mode, on what terms, and of what: the inventory is the whole node's. seat: in mode mps."""

    container: Container
    mode: Mode
    inventory: Inventory
    ledger: Ledger
    terms: Terms
    seat: Seat | None = None


class Offer(Struct, frozen=True):
    """What of the node one container may be given.

    inventory: without what it may not have. closed: GPUs in pools for others (None: in no pool, and its rule wants
    one). full: GPUs that as many containers share already as may, with where that is said. seated: GPUs whose MPS
    daemon has no such seat left, each with why. kubelets: what to do where only the kubelet has any to give.
    """

    inventory: Inventory
    closed: Mapping[GpuUuid, Pool | None]
    full: Mapping[GpuUuid, tuple[int, str]]
    seated: Mapping[GpuUuid, Reason] = field(default_factory=dict)
    kubelets: str = ""

    def explained(self, reason: Reason) -> Reason:
        """A refusal that also says what was left out; where there is room, for its end says what to do."""
        if self.kubelets:
            return Reason(reason.code, self.kubelets)
        if self.seated and reason.code in (Code.NO_SUCH_GPU, Code.GPU_BUSY):
            return next(iter(self.seated.values()))  # what is left out for that says more than what is left
        said = "; ".join(filter(None, (self._pools(), self._full())))
        longer = Reason(reason.code, f"{reason.sentence[:-1]} (not offered here: {said}).")
        return longer if said and len(f"nri-gpu [{reason.code}]: {longer.sentence}") <= REFUSAL_MAX else reason

    def _pools(self) -> str:
        if not self.closed:
            return ""
        names = list(dict.fromkeys(quoted(pool.name) for pool in self.closed.values() if pool is not None))
        shown = ", ".join(names[:_POOLS_SHOWN]) + ", ..." * (len(names) > _POOLS_SHOWN)
        where = f"in pool {shown}, kept for others" if names else "in no pool, and its rule names one"
        return f"{len(self.closed)} {where}"

    def _full(self) -> str:
        if not self.full:
            return ""
        paths = ", ".join(sorted({path for _, path in self.full.values()}))
        return f"{len(self.full)} shared by as many containers as may ({paths})"


def keeps_nothing(terms: Terms) -> bool:
    """Whether all of the node is offered, and nothing is too much, whoever asks."""
    return terms.limits == NO_LIMITS and not terms.policy.pool.pools


def offered(bidder: Bidder, claim: Claim) -> Offer:
    """The node as a container may see it; the very same inventory where nothing is kept from it."""
    # The kubelet is held to its pool where it is offered GPUs; what it gave is not looked at twice.
    closed = {} if claim.kubelet else bidder.terms.closed_pools(bidder.inventory, bidder.container.pod.namespace)
    # Where GPUs are named, or all are asked for, a full one refuses; where any will do, another is taken.
    full = _full(bidder) if isinstance(claim.wanted, Count | MigProfiles) else {}
    seated = _seated(bidder, claim) if isinstance(claim.wanted, Count) else {}
    hidden = closed.keys() | full.keys() | seated.keys()
    inventory = _without(bidder.inventory, hidden)
    return Offer(inventory, closed, full, seated, "" if inventory.gpus else _of_the_kubelet(bidder, closed))


def _of_the_kubelet(bidder: Bidder, closed: Mapping[GpuUuid, Pool | None]) -> str:
    """Where all that is closed to this container is the kubelet's, to which it has to go."""
    settings = bidder.terms.policy.kubelet
    pools = {pool.name for pool in closed.values() if pool is not None}
    if not settings.enabled or pools != {settings.pool}:
        return ""
    return (
        f"every GPU that {quoted(bidder.container.pod.namespace)} may have here is in pool {quoted(settings.pool)}, "
        f"which only the kubelet gives from: write {settings.resource} into the container's resources.limits, and keep "
        "the annotation for capabilities= and the like, which shape what the kubelet gives."
    )


def over_limit(bidder: Bidder, chosen: tuple[Unit, ...]) -> Reason | None:
    """Why these GPUs would be too many for whom they are, by the narrowest limit; None when they are not."""
    full = _full(bidder)
    for unit in chosen:
        if unit.uuid in full:
            return Reason(Code.OVER_LIMIT, _too_many(unit, full[unit.uuid], bidder.terms.source))
    if faults := _seat_faults(bidder, chosen):
        return next(iter(faults.values()))
    limits = bidder.terms.limits
    if limits == NO_LIMITS:
        return None
    pod = bidder.container.pod
    held = _holdings(bidder.container, bidder.ledger) if counts_holders(limits) else Holdings()
    uuids, exclusive = frozenset(unit.uuid for unit in chosen), bidder.mode is Mode.EXCLUSIVE
    for excess in excesses(limits, held, uuids, pod.namespace, pod.name, exclusive=exclusive):
        return Reason(Code.OVER_LIMIT, excess.sentence(bidder.terms.limit_path(excess.key), bidder.terms.source))
    return None


def _seated(bidder: Bidder, claim: Claim) -> Mapping[GpuUuid, Reason]:
    """GPUs that fit, and whose daemon has no such seat left."""
    return _seat_faults(bidder, fitting_gpus(bidder.inventory, claim.selectors))


def _seat_faults(bidder: Bidder, units: Iterable[Unit]) -> Mapping[GpuUuid, Reason]:
    if bidder.mode is not Mode.MPS or bidder.seat is None:
        return {}
    usage = bidder.ledger.released(bidder.container.id).usage()
    most = bidder.terms.policy.mps.containers_per_gpu
    faults = ((unit.uuid, seat_fault(unit, usage.get(unit.uuid, UNUSED), bidder.seat, most)) for unit in units)
    return {uuid: fault for uuid, fault in faults if fault}


def _full(bidder: Bidder) -> Mapping[GpuUuid, tuple[int, str]]:
    """GPUs that no more containers may share: how many may, and where that is said."""
    if bidder.mode is not Mode.SHARED or not bidder.terms.limits_sharing:
        return {}
    members = bidder.terms.policy.pool.members(bidder.inventory)
    full: dict[GpuUuid, tuple[int, str]] = {}
    for uuid, used in bidder.ledger.released(bidder.container.id).usage().items():
        limit, path = bidder.terms.containers_per_gpu(members.get(uuid))
        if used.load >= limit:
            full[uuid] = (limit, path)
    return full


def _too_many(unit: Unit, full: tuple[int, str], source: str) -> str:
    limit, path = full
    return (
        f"{called(unit)} is shared by {limit} container{'s' * (limit > 1)} already, as many as may ({path} in {source}"
        "): wait until one ends, ask for another GPU, or raise that limit."
    )


def _holdings(container: Container, ledger: Ledger) -> Holdings:
    """Of everybody but this very container."""
    pod: set[GpuUuid] = set()
    namespace: set[GpuUuid] = set()
    exclusive: set[GpuUuid] = set()
    node: set[GpuUuid] = set()
    for entry in ledger.entries.values():
        grant = entry.grant
        if not entry.holds or grant.container_id == container.id:
            continue
        node.update(grant.uuids)
        if grant.pod_uid == container.pod.uid:
            pod.update(grant.uuids)
        if grant.namespace == container.pod.namespace:
            namespace.update(grant.uuids)
            if grant.mode is Mode.EXCLUSIVE:
                exclusive.update(grant.uuids)
    return Holdings(pod=pod, namespace=namespace, namespace_exclusive=exclusive, node=node)


def _without(inventory: Inventory, hidden: frozenset[GpuUuid] | set[GpuUuid]) -> Inventory:
    if not hidden:
        return inventory
    return replace(inventory, gpus=tuple(_open_part(gpu, hidden) for gpu in inventory.gpus if _seen(gpu, hidden)))


def _seen(gpu: Gpu, hidden: frozenset[GpuUuid] | set[GpuUuid]) -> bool:
    """A hidden GPU goes, unless it is in MIG mode, where it stands for those of its MIG devices that are offered."""
    return gpu.uuid not in hidden or (gpu.mig_enabled and any(part.uuid not in hidden for part in gpu.mig))


def _open_part(gpu: Gpu, hidden: frozenset[GpuUuid] | set[GpuUuid]) -> Gpu:
    if hidden.isdisjoint(part.uuid for part in gpu.mig):
        return gpu
    return replace(gpu, mig=tuple(part for part in gpu.mig if part.uuid not in hidden))
