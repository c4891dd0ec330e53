"""The requests that are eligible for GPUs, the GPUs that each may be placed on, and the limits on those chosen.

A request is eligible if policy allows it and the node can grant any GPU at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.decision.mps_seats import MPS_IN_CLUSTER, folder_fault, seat_fault, single_gpu_fault
from nri_gpu.decision.placement import find_unit
from nri_gpu.decision.refusals import by_the_kernel, called, fitting_gpus, in_pool, named_few
from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code, Grant, Reason
from nri_gpu.domain.edits import NO_EXTRAS, Extras
from nri_gpu.domain.gpu import Capabilities, Capability, Gpu, GpuUuid, Unit, closure
from nri_gpu.domain.gpu_request import Claim, Count, Devices, Everything, MigProfiles, Mode
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import DriverFiles, Inventory, Node
from nri_gpu.domain.text import counted, quoted
from nri_gpu.injection.device_nodes import missing_modules, two_versions
from nri_gpu.injection.mps_client import client_hindrance
from nri_gpu.ledger.holders import UNUSED, Reservation, Usage
from nri_gpu.ledger.ledger import Entry, Ledger, without
from nri_gpu.policy.model import Policy, PrivilegedAction
from nri_gpu.policy.rules import NO_LIMITS, Pool
from nri_gpu.policy.select import Allowed, Holdings, Terms
from nri_gpu.request.annotation import opt_out
from nri_gpu.request.environment import VARIABLE

_POOLS_SHOWN: Final = 3
_RESOURCES_SHOWN: Final = 2  # with their pools, in a refusal that says much else


class Eligible(Struct, frozen=True):
    """A request that policy allows, with policy's defaults filled in."""

    claim: Claim
    terms: Terms
    mode: Mode
    capabilities: Capabilities  # closed
    extras: Extras
    rule: str  # what allowed the request
    seat: Seat | None = None  # its share of an MPS daemon, or None in other modes
    unmade: Mapping[str, str] = {}  # see `MpsFolders`
    left_out: str = ""  # as in `DriverParts`


def check_request(
    claim: Claim, container: Container, policy: Policy, allowed: Allowed, node: Node
) -> Eligible | Reason:
    """Return the request with its defaults, or why policy refuses it. The node's GPUs do not matter here."""
    terms = allowed.terms
    mode = claim.mode or terms.mode
    capabilities = closure(terms.capabilities if claim.capabilities is None else claim.capabilities)
    extras = claim.extras if claim.extras != NO_EXTRAS or claim.admin else terms.extras
    denied = _denied_source(claim, container, policy)
    if denied := denied or terms.denied(None if claim.admin else mode, capabilities, extras.asked):
        return denied
    seat = _mps_seat(claim, container, node, terms) if mode is Mode.MPS else None
    if isinstance(seat, Reason):
        return seat
    return Eligible(claim, terms, mode, capabilities, extras, allowed.rule, seat, node.mps.unmade)


def _denied_source(claim: Claim, container: Container, policy: Policy) -> Reason | None:
    """Return why policy refuses a request for where it was written, or for the container that makes it, or None."""
    if claim.key == VARIABLE and isinstance(claim.wanted, Everything) and not policy.environment.may_ask_all:
        return Reason(
            Code.NOT_ALLOWED,
            f"{VARIABLE}=all asks for every GPU, and every CUDA image sets it",
            cure="name GPUs in it, set it to void, use a gpu.nri.io annotation, or set environment.may_ask_all in the "
            "policy",
        )
    if container.privileged and policy.privileged.action is PrivilegedAction.DENY:
        return Reason(
            Code.NOT_ALLOWED,
            "a privileged container can use every GPU of this node whatever it is granted, so privileged.action in the "
            "policy denies its request",
            cure="make it unprivileged, or change that setting",
        )
    return None


def _mps_seat(claim: Claim, container: Container, node: Node, terms: Terms) -> Seat | Reason:
    """Return the container's share of an MPS daemon, or why it cannot have one."""
    mps = terms.policy.mps
    away = Reason(Code.NODE_NOT_READY, node.mps.fault) if node.mps.fault else None
    denied = mps.denied(claim.sharing, terms.source) or away or single_gpu_fault(claim) or client_hindrance(container)
    return denied or mps.seat(claim.sharing, container.uid)


def node_fault(capabilities: Capabilities, node: Node) -> Reason | None:
    """Return why this node can grant no GPU with these capabilities, whichever GPUs are free, or None."""
    if node.inventory.fault:
        fault, gpus = node.inventory.fault, by_the_kernel(node.inventory)
        return _cannot_grant(f"{fault.rstrip('.')}{gpus}" if gpus else fault)
    if not node.inventory.gpus:
        return None  # `place` explains it better
    if reason := missing_modules(capabilities, node.inventory):
        return reason
    if node.driver is None:
        return _cannot_grant(node.driver_fault or "the driver's files are not found yet; try again")
    if fault := _version_fault(node.driver.version, node):
        return _cannot_grant(fault)
    # A compatibility package may stand in for libcuda; that depends on the container, so `plan_for` checks it.
    if reason := lacking_library(capabilities - {Capability.COMPUTE} if node.compat else capabilities, node):
        return reason
    if not node.inventory.simulated and capabilities not in node.driver.trees:
        return _not_staged(capabilities, node.driver)
    return None


def lacking_library(capabilities: Capabilities, node: Node) -> Reason | None:
    """Return why the driver cannot serve these capabilities, or None: a library that one of them stands for is missing.

    capabilities: closed.
    """
    driver = None if node.inventory.simulated else node.driver
    if driver is None or not (lacking := [each for each in Capability if each in capabilities & driver.lacks.keys()]):
        return None
    left = [each for each in Capability if closure(frozenset({each})) <= capabilities - driver.lacks.keys()]
    instead = ",".join(each for each in left if each is not Capability.COMPAT32)
    instead = instead or ("" if Capability.UTILITY in driver.lacks else Capability.UTILITY)
    ask = f", ask with capabilities={instead}," if instead else ""
    libraries = " and no ".join(f"{driver.lacks[each]} for {each}" for each in lacking)
    return Reason(
        Code.NODE_NOT_READY,
        f"the driver on this node has no {libraries}, and an image's own does not count",
        cure=f"install that part of it{ask} or run the pod on a node that has it",
    )


def _cannot_grant(fault: str) -> Reason:
    return Reason(Code.NODE_NOT_READY, "this node cannot grant GPUs", fault)


def _not_staged(capabilities: Capabilities, driver: DriverFiles) -> Reason:
    code, known = Code.NODE_NOT_READY, frozenset[Capability]().union(*driver.trees)
    if lacking := [each for each in Capability if each in capabilities - known]:
        what = f"the driver on this node has no files for {', '.join(lacking)}"
        return Reason(code, what, cure="install that part of it, ask without, or run the pod on a node that has it")
    if capabilities == {Capability.COMPAT32}:
        return Reason(code, "compat32 means the 32-bit libraries of other capabilities", cure="name them too")
    wanted = ", ".join(sorted(capabilities))
    return Reason(code, f"the driver's files for {wanted} are not staged on this node; try again")


def _version_fault(files: str, node: Node) -> str:
    """Return why libraries of this version do not work with the loaded kernel module, or empty."""
    if node.inventory.simulated:
        return ""
    if node.module_version == "":
        return (
            f"the nvidia kernel module was unloaded, and the driver's libraries are {files}: a driver is being "
            "replaced or was removed; once `modprobe nvidia` has loaded it, try again."
        )
    for kernel in filter(None, (node.module_version, node.inventory.driver_version)):
        if kernel != files:
            return f"{two_versions(files, kernel)}; containers created in between would not start properly."
    return ""


class Others(Struct, frozen=True):
    """Everybody that holds GPUs, but for one container, lost attempts at it, and the claims by which it asks."""

    ledger: Ledger
    usage: Mapping[GpuUuid, Usage]  # of `ledger`
    lost: Mapping[ContainerId, Entry] = {}  # those attempts

    @classmethod
    def of(cls, container: Container, ledger: Ledger, usage: Mapping[GpuUuid, Usage]) -> Self:
        """Return the others of a container that is about to be created. usage: of this ledger."""
        lost = ledger.lost_before(container.pod.uid, container.name)
        others = ledger.without_containers({container.id, *lost})
        if isinstance(container.kubelet, Allocated) and container.kubelet.claims:
            others = replace(others, claims=without(others.claims, frozenset(container.kubelet.claims)))
        return cls(others, usage if others is ledger else others.usage(), lost)


class Candidates(Struct, frozen=True):
    """The GPUs that one request may be placed on, and why the rest of the node's GPUs are left out."""

    inventory: Inventory  # the node's, without the GPUs that are left out
    # GPUs in pools for others, with the pool; None: in no pool, and the request's rule names a pool.
    closed: Mapping[GpuUuid, Pool | None] = {}
    # GPUs that as many containers share as may, with the limit and where it is set.
    full: Mapping[GpuUuid, tuple[int, str]] = {}
    no_seat: Mapping[GpuUuid, Reason] = {}  # GPUs whose MPS daemon has no room for the request, each with why
    kubelet_only: str = ""  # what to do if only the kubelet allocates the GPUs that are left out, or empty
    kept: Reason | None = None  # why the request cannot have a GPU that it names and that is left out, or None

    @classmethod
    def of(cls, asked: Eligible, container: Container, inventory: Inventory, others: Mapping[GpuUuid, Usage]) -> Self:
        """Return the candidates of one request. inventory: the whole node's. others: usage by others."""
        claim = asked.claim
        # The kubelet allocates within its own pool, so GPUs that it allocated need no second check.
        closed = {} if claim.kubelet else asked.terms.closed_pools(inventory, container.pod.namespace)
        # A full GPU refuses a request that names it or asks for all; a request for any GPU takes another one.
        full = _full(asked, inventory, others) if isinstance(claim.wanted, Count | MigProfiles) else {}
        fitting = fitting_gpus(inventory, claim.selectors) if asked.seat and isinstance(claim.wanted, Count) else ()
        no_seat = _seat_faults(asked, others, fitting)
        left = _without(inventory, closed.keys() | full.keys() | no_seat.keys())
        kubelet_only = "" if left.gpus else _kubelet_only(asked, container, closed)
        return cls(left, closed, full, no_seat, kubelet_only, _kept(asked, inventory, closed))

    def explained(self, reason: Reason) -> Reason:
        """Add what was left out to the refusal if there is room: the refusal's end says what to do."""
        if self.kubelet_only:
            return Reason(reason.code, self.kubelet_only)
        if self.kept and reason.code is Code.NO_SUCH_GPU:
            return self.kept
        if self.no_seat and reason.code in (Code.NO_SUCH_GPU, Code.GPU_BUSY):
            return next(iter(self.no_seat.values()))  # explains more than what is left
        said = "; ".join(filter(None, (self._pools(), self._full())))
        longer = replace(reason, aside=f"not offered here: {said}")
        return longer if said and longer.fits else reason

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
        return f"{len(self.full)} shared by the most containers allowed ({paths})"


def over_limit(
    asked: Eligible,
    container: Container,
    inventory: Inventory,
    others: Others,
    chosen: tuple[Unit, ...],
    *,
    claim: bool = False,
) -> Reason | None:
    """Return why granting these GPUs exceeds a limit, the narrowest limit first, or None.

    claim: a claim that is to be prepared asks, and the container stands for the claim's pod.
    """
    terms = asked.terms
    full = _full(asked, inventory, others.usage)
    for unit in chosen:
        if unit.uuid in full:
            return _too_many(unit, full[unit.uuid], terms.source)
    if faults := _seat_faults(asked, others.usage, chosen):
        return next(iter(faults.values()))
    if terms.limits == NO_LIMITS:
        return None
    uuids, exclusive = frozenset(unit.uuid for unit in chosen), asked.mode is Mode.EXCLUSIVE
    return terms.denied_number(
        uuids, _holdings(container, others.ledger), container.pod, exclusive=exclusive, claim=claim
    )


def _kubelet_only(asked: Eligible, container: Container, closed: Mapping[GpuUuid, Pool | None]) -> str:
    """Return what to do if all closed GPUs are in pools of the kubelet, or in that of ResourceClaims, else empty."""
    kubelet, dra = asked.terms.policy.kubelet, asked.terms.policy.dra
    pools = dict.fromkeys(pool.name for pool in closed.values() if pool is not None)
    of_kubelet = kubelet.enabled and pools and kubelet.pools.issuperset(pools)
    if of_kubelet and asked.mode is Mode.MPS:
        how = f"the kubelet allocates from, and never in mode=mps: {MPS_IN_CLUSTER}"
    elif of_kubelet:
        resources = " or ".join(f"{kubelet.resource_of(each)}{kubelet.suffix}" for each in [*pools][:_RESOURCES_SHOWN])
        how = (
            f"the kubelet allocates from: write {resources} into the container's resources.limits, and keep the "
            "annotation for capabilities= and the like, which shape what the kubelet allocates"
        )
    elif dra.enabled and {dra.pool} == {*pools}:
        how = f"ResourceClaims get: give the pod a claim with a DeviceClass of {dra.driver} instead of the annotation"
    else:
        return ""
    namespace = quoted(container.pod.namespace)
    left_out = opt_out(asked.claim.key, container.name)
    where = named_few(map(quoted, pools), _RESOURCES_SHOWN)
    return f"every GPU that {namespace} may have here is in pool {where}, which only {how}{left_out}"


def _kept(asked: Eligible, inventory: Inventory, closed: Mapping[GpuUuid, Pool | None]) -> Reason | None:
    """Return why the first named GPU that is closed cannot be had, or None."""
    claim, kubelet = asked.claim, asked.terms.policy.kubelet
    names = claim.wanted.ids if closed and isinstance(claim.wanted, Devices) else ()
    for unit in (find_unit(each, inventory, kubelet=claim.kubelet) for each in names):
        if not isinstance(unit, Reason) and unit.uuid in closed:
            name = pool.name if (pool := closed[unit.uuid]) else ""
            of_kubelet = kubelet.enabled and name in kubelet.pools
            return in_pool(unit, name, f"{kubelet.resource_of(name)}{kubelet.suffix}" if of_kubelet else "")
    return None


def _seat_faults(asked: Eligible, others: Mapping[GpuUuid, Usage], units: Iterable[Unit]) -> Mapping[GpuUuid, Reason]:
    """Return the GPUs among these whose MPS daemon cannot serve the request, each with why."""
    if asked.seat is None:
        return {}
    most = asked.terms.policy.mps.containers_per_gpu
    faults = (
        (
            unit.uuid,
            folder_fault(unit, asked.unmade) or seat_fault(unit, others.get(unit.uuid, UNUSED), asked.seat, most),
        )
        for unit in units
    )
    return {uuid: fault for uuid, fault in faults if fault}


def _full(asked: Eligible, inventory: Inventory, others: Mapping[GpuUuid, Usage]) -> Mapping[GpuUuid, tuple[int, str]]:
    """Return the GPUs that no more containers may share, with the limit and where it is set."""
    if asked.mode is not Mode.SHARED or not asked.terms.limits_sharing:
        return {}
    members = asked.terms.policy.pool.members(inventory)
    full: dict[GpuUuid, tuple[int, str]] = {}
    for uuid, used in others.items():
        limit, path = asked.terms.containers_per_gpu(members.get(uuid))
        if used.load >= limit:
            full[uuid] = (limit, path)
    return full


def _too_many(unit: Unit, full: tuple[int, str], source: str) -> Reason:
    limit, path = full
    return Reason(
        Code.OVER_LIMIT,
        f"{called(unit)} is shared by {counted(limit, 'container')} already, the most allowed ({path} in {source})",
        cure="wait until one ends, ask for another GPU, or raise that limit",
    )


def _holdings(container: Container, others: Ledger) -> Holdings:
    """Return the GPUs that its pod, its namespace and the node hold. others: the ledger without this container."""
    pod: set[GpuUuid] = set()
    namespace: set[GpuUuid] = set()
    exclusive: set[GpuUuid] = set()
    node: set[GpuUuid] = set()
    grants = (entry.grant for entry in others.entries.values() if entry.holds)
    holders: list[tuple[Grant | Reservation, tuple[GpuUuid, ...]]] = [(grant, grant.held) for grant in grants]
    holders += [(each, (device.uuid,)) for device, each in others.reservations.items()]
    for holder, uuids in holders:
        node.update(uuids)
        if holder.pod_uid == container.pod.uid:
            pod.update(uuids)
        if holder.namespace == container.pod.namespace:
            namespace.update(uuids)
            if holder.mode is Mode.EXCLUSIVE:
                exclusive.update(uuids)
    for claim in others.claims.values():
        node.update(claim.holds)
        if container.pod.uid in claim.pods:
            pod.update(claim.holds)
        if claim.namespace == container.pod.namespace:
            namespace.update(claim.holds)
            exclusive.update(uuid for uuid, mode in claim.holds.items() if mode is Mode.EXCLUSIVE)
    return Holdings(pod=pod, namespace=namespace, namespace_exclusive=exclusive, node=node)


def _without(inventory: Inventory, hidden: set[GpuUuid]) -> Inventory:
    if not hidden:
        return inventory
    return replace(inventory, gpus=tuple(_visible_part(gpu, hidden) for gpu in inventory.gpus if _seen(gpu, hidden)))


def _seen(gpu: Gpu, hidden: set[GpuUuid]) -> bool:
    """Return whether a GPU stays: it is not hidden, or in MIG mode it stands for MIG devices that are candidates."""
    return gpu.uuid not in hidden or (gpu.mig_enabled and any(part.uuid not in hidden for part in gpu.mig))


def _visible_part(gpu: Gpu, hidden: set[GpuUuid]) -> Gpu:
    if hidden.isdisjoint(part.uuid for part in gpu.mig):
        return gpu
    return replace(gpu, mig=tuple(part for part in gpu.mig if part.uuid not in hidden))
