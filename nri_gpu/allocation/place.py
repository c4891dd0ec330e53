"""Which GPUs a claim gets: pure and deterministic. Topology comes later; here order is NVML's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never

from nri_gpu.allocation.fit import fitting_gpus, matches, why_not
from nri_gpu.allocation.ledger import UNUSED, Ledger, Usage
from nri_gpu.allocation.words import (
    all_busy,
    ambiguous,
    busy,
    called,
    cannot,
    counted,
    misfit,
    none_fit,
    too_few,
    too_few_parts,
    unknown,
)
from nri_gpu.domain.claim import Claim, Count, Devices, Everything, MigProfile, MigProfiles, Mode, Nothing
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, Inventory, MigPart, Unit, nvml_order

__all__ = ["Asker", "matches", "place", "why_not"]


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and in which mode."""

    pod_uid: PodUid
    mode: Mode


def place(claim: Claim, asker: Asker, inventory: Inventory, ledger: Ledger) -> tuple[Unit, ...] | Reason:
    """The GPUs and MIG devices a claim gets, in NVML order, or why it gets none."""
    usage = ledger.usage()
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
        if (use := usage.get(gpu.uuid)) and use.blocks(asker.mode, asker.pod_uid):
            return busy(gpu, asker.pod_uid, asker.mode, use)
    return chosen


def _count(
    gpus: int, claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Gpu, ...] | Reason:
    fitting = fitting_gpus(inventory, claim.selectors)
    if len(fitting) < gpus:
        return none_fit(claim, inventory) if not fitting else too_few(gpus, claim, fitting, inventory)
    return _least_loaded(gpus, "GPU", fitting, asker, usage)


def _profiles(
    profiles: Sequence[MigProfile], claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[MigPart, ...] | Reason:
    chosen: list[MigPart] = []
    for wanted in profiles:
        alike = [part for part in inventory.parts if part.device.profile == wanted.profile and not why_not(part)]
        fitting = [part for part in alike if matches(part, claim.selectors)]
        if len(fitting) < wanted.devices:
            return too_few_parts(wanted, claim, inventory)
        some = _least_loaded(wanted.devices, f"{wanted.profile} MIG device", fitting, asker, usage)
        if isinstance(some, Reason):
            return some
        chosen += some  # no profile comes twice, so neither does a device
    return tuple(sorted(chosen, key=nvml_order))


U = TypeVar("U", Gpu, MigPart)


def _least_loaded(
    number: int, noun: str, fitting: Sequence[U], asker: Asker, usage: Mapping[GpuUuid, Usage]
) -> tuple[U, ...] | Reason:
    """The least loaded first, then the lowest index.

    In exclusive mode the only load is the pod's own containers, so they get GPUs of their own while there are any and
    share when there are none.
    """
    open_ones = [unit for unit in fitting if not usage.get(unit.uuid, UNUSED).blocks(asker.mode, asker.pod_uid)]
    if len(open_ones) < number:
        return all_busy(counted(number, noun), asker.mode, fitting, open_ones, usage)
    ranked = sorted(open_ones, key=lambda unit: (usage.get(unit.uuid, UNUSED).load, nvml_order(unit)))
    return tuple(sorted(ranked[:number], key=nvml_order))


def _named(
    ids: tuple[str, ...], claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Unit, ...] | Reason:
    chosen: dict[GpuUuid, Unit] = {}
    for wanted in ids:
        unit = _find(wanted, inventory)
        if isinstance(unit, Reason):
            return unit
        if why := why_not(unit):
            return cannot(called(unit), why)
        if not matches(unit, claim.selectors):
            return misfit(unit)
        if usage.get(unit.uuid, UNUSED).blocks(asker.mode, asker.pod_uid):
            return busy(unit, asker.pod_uid, asker.mode, usage[unit.uuid])
        chosen[unit.uuid] = unit
    return tuple(sorted(chosen.values(), key=nvml_order))


def _find(wanted: str, inventory: Inventory) -> Unit | Reason:
    """By NVML index, PCI bus id, UUID or its unambiguous beginning; a MIG device by both indices or its UUID."""
    found: list[Unit] = []
    if wanted.isdecimal():
        found += [gpu for gpu in inventory.gpus if gpu.index == int(wanted)]
        lost = [fault.reason for fault in inventory.faults if fault.index == int(wanted)]
        if lost and not found:
            return cannot(f"GPU {wanted}", lost[0])
    else:
        asked = wanted.lower()
        found += [gpu for gpu in inventory.gpus if gpu.pci_bus_id == asked or gpu.uuid.lower().startswith(asked)]
        found += [part for part in inventory.parts if part.place == asked or part.uuid.lower().startswith(asked)]
    if len(found) > 1:
        return ambiguous(wanted, len(found))
    return found[0] if found else unknown(wanted, inventory)
