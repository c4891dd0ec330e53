"""The choice of GPUs for a claim: free of side effects, and the same for the same node and ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TypeVar, assert_never

from msgspec import Struct

from nri_gpu.decision.refusals import (
    all_busy,
    ambiguous,
    busy,
    called,
    cannot,
    fitting_gpus,
    matches,
    misfit,
    none_fit,
    too_few,
    too_few_parts,
    unknown,
    why_not,
)
from nri_gpu.decision.topology import Surroundings, choose, topology_of
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit, nvml_order
from nri_gpu.domain.gpu_request import (
    Claim,
    Count,
    Devices,
    Everything,
    MigProfile,
    MigProfiles,
    Mode,
    Nothing,
    Strategy,
)
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted
from nri_gpu.ledger.holders import UNUSED, Usage


class Asker(Struct, frozen=True):
    """The pod that asks for GPUs."""

    pod_uid: PodUid
    mode: Mode
    strategy: Strategy = Strategy.PACK  # policy's, for exclusive GPUs
    claims: Set[ClaimUid] = frozenset()  # ResourceClaims by which the pod asks


def place(
    claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Unit, ...] | Reason:
    """Return the GPUs and MIG devices a claim gets, in NVML order, or why it gets none. usage: of the ledger."""
    match claim.wanted:
        case Nothing():
            return ()
        case Everything():
            return _all(claim, asker, inventory, usage)
        case Devices(ids):
            return _named(ids, claim, asker, inventory, usage)
        case Count(gpus):
            return _count(gpus, claim, asker, inventory, usage)
        case MigProfiles(wanted):
            return _profiles(wanted, claim, asker, inventory, usage)
        case never:
            assert_never(never)


def _all(claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]) -> tuple[Gpu, ...] | Reason:
    chosen = fitting_gpus(inventory, claim.selectors)
    if not chosen:
        return none_fit(claim, inventory)
    for gpu in chosen:
        if (use := usage.get(gpu.uuid)) and use.blocks(asker.mode, asker.pod_uid, asker.claims):
            return busy(gpu, asker.pod_uid, asker.mode, use, asker.claims)
    return chosen


def _count(
    gpus: int, claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Gpu, ...] | Reason:
    fitting = fitting_gpus(inventory, claim.selectors)
    if len(fitting) < gpus:
        return none_fit(claim, inventory) if not fitting else too_few(gpus, claim, fitting, inventory)
    open_ones = _open(gpus, "GPU", fitting, asker, usage)
    return open_ones if isinstance(open_ones, Reason) else _best(gpus, open_ones, asker, inventory, usage)


def _best(
    number: int, open_ones: Sequence[Gpu], asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Gpu, ...]:
    """Return the first GPUs by rank; among equals, those that are best linked to each other and to the first."""
    topology = topology_of(inventory)
    ranked = sorted((_rank(gpu, asker, usage), topology.places[gpu.uuid]) for gpu in open_ones)
    last, _ = ranked[number - 1]
    taken = tuple(at for rank, at in ranked if rank < last)
    pool = tuple(at for rank, at in ranked if rank == last)
    if asker.mode is not Mode.EXCLUSIVE:  # spread by load alone: the other GPUs stay open
        chosen = choose(topology, number - len(taken), pool, taken=taken)
    else:
        chosen = choose(topology, number - len(taken), pool, taken=taken, around=_surroundings(asker, inventory, usage))
    return tuple(inventory.gpus[at] for at in sorted((*taken, *chosen)))


def _surroundings(asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]) -> Surroundings:
    """Return the rest of the node, including the GPUs that the selectors leave out."""
    able = [(at, usage.get(gpu.uuid)) for at, gpu in enumerate(inventory.gpus) if not why_not(gpu)]
    return Surroundings(
        friends=tuple(at for at, use in able if use is not None and asker.pod_uid in use.pods),
        free=tuple(at for at, use in able if use is None),
        strategy=asker.strategy,
    )


def _rank(unit: Unit, asker: Asker, usage: Mapping[GpuUuid, Usage]) -> tuple[int, bool, bool]:
    """Rank a unit: the least loaded first, then any that the pod has not just released, then those that the pod uses.

    In exclusive mode the only load is the pod's own containers, so each gets its own GPU while there are any, and they
    share when there are none.
    """
    use = usage.get(unit.uuid, UNUSED)
    return use.load, use.releasing is not None, asker.pod_uid not in use.pods


def _profiles(
    profiles: Sequence[MigProfile], claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[MigPart, ...] | Reason:
    chosen: list[MigPart] = []
    for wanted in profiles:
        alike = [part for part in inventory.parts if part.device.profile == wanted.profile and not why_not(part)]
        fitting = [part for part in alike if matches(part, claim.selectors)]
        if len(fitting) < wanted.devices:
            return too_few_parts(wanted, claim, inventory)
        open_ones = _open(wanted.devices, f"{wanted.profile} MIG device", fitting, asker, usage)
        if isinstance(open_ones, Reason):
            return open_ones
        chosen += _fewest_gpus(wanted.devices, open_ones, asker, usage, chosen)  # no profile comes twice
    return tuple(sorted(chosen, key=nvml_order))


def _fewest_gpus(
    number: int,
    open_ones: Sequence[MigPart],
    asker: Asker,
    usage: Mapping[GpuUuid, Usage],
    chosen: Sequence[MigPart],
) -> Sequence[MigPart]:
    """Return the first MIG devices by rank, then by how many of their GPU's MIG devices are in use.

    `pack` takes the GPU with the most in use, which leaves other GPUs unused; `spread` the one with the fewest. Links
    do not count: a program can use only one MIG device, and no MIG device reaches another.
    """
    weight = 0 if asker.mode is not Mode.EXCLUSIVE else {Strategy.PACK: -1, Strategy.SPREAD: 1}[asker.strategy]
    among = {part.gpu.uuid: part.gpu for part in open_ones}
    in_use = {uuid: sum(part in chosen or part.uuid in usage for part in gpu.parts) for uuid, gpu in among.items()}
    return sorted(
        open_ones,
        key=lambda part: (_rank(part, asker, usage), weight * in_use[part.gpu.uuid], nvml_order(part)),
    )[:number]


U = TypeVar("U", Gpu, MigPart)


def _open(
    number: int, noun: str, fitting: Sequence[U], asker: Asker, usage: Mapping[GpuUuid, Usage]
) -> list[U] | Reason:
    """Return the fitting units that can be granted now, or why they are too few."""
    open_ones = [
        unit for unit in fitting if not usage.get(unit.uuid, UNUSED).blocks(asker.mode, asker.pod_uid, asker.claims)
    ]
    if len(open_ones) < number:
        return all_busy(counted(number, noun), asker.mode, fitting, open_ones, usage)
    return open_ones


def _named(
    ids: tuple[str, ...], claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Unit, ...] | Reason:
    chosen: dict[GpuUuid, Unit] = {}
    for wanted in ids:
        unit = find_unit(wanted, inventory, kubelet=claim.kubelet)
        if isinstance(unit, Reason):
            return unit
        if why := why_not(unit, admin=claim.admin):
            return cannot(called(unit), why, kubelet=claim.kubelet)
        if not matches(unit, claim.selectors):
            return misfit(unit, claim)
        if usage.get(unit.uuid, UNUSED).blocks(asker.mode, asker.pod_uid, asker.claims):
            return busy(unit, asker.pod_uid, asker.mode, usage[unit.uuid], asker.claims, kubelet=claim.kubelet)
        chosen[unit.uuid] = unit
    return tuple(sorted(chosen.values(), key=nvml_order))


def find_unit(wanted: str, inventory: Inventory, *, kubelet: bool) -> Unit | Reason:
    """Find a unit by NVML index, PCI bus id, UUID or its unambiguous beginning.

    A MIG device is found by both indices or by its UUID, too.
    """
    found: list[Unit] = []
    asked = wanted.lower()
    if wanted.isdecimal():
        found += [gpu for gpu in inventory.gpus if gpu.index == int(wanted)]
        missed = [fault for fault in inventory.faults if fault.index == int(wanted)]
    else:
        found += [gpu for gpu in inventory.gpus if gpu.pci_bus_id == asked or gpu.uuid.lower().startswith(asked)]
        found += [part for part in inventory.parts if part.place == asked or part.uuid.lower().startswith(asked)]
        missed = [each for each in inventory.faults if each.pci_bus_id == asked or each.uuid.lower().startswith(asked)]
    if missed and not found:
        return cannot(f"GPU {missed[0].index}", missed[0].reason, kubelet=kubelet)
    if not found and (known := _by_the_kernel(asked, inventory, kubelet=kubelet)):
        return known
    if len(found) > 1:
        return ambiguous(wanted, len(found))
    return found[0] if found else unknown(wanted, inventory, kubelet=kubelet)


def _by_the_kernel(asked: str, inventory: Inventory, *, kubelet: bool) -> Reason | None:
    """Return why a GPU that NVML does not list cannot be granted, or None if the kernel does not show it either."""
    for gpu in inventory.unlisted:
        if gpu.pci_bus_id == asked or (gpu.uuid and gpu.uuid.lower().startswith(asked)):
            return cannot(f"GPU {gpu.pci_bus_id}", gpu.reason, kubelet=kubelet)
    return None
