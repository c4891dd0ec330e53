"""The clients that may share a GPU's MPS daemon: how many, with how much memory together, and of which user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from nri_gpu.decision.refusals import MEMORY_UNKNOWN, called
from nri_gpu.domain.decision import Code, Grant, Reason
from nri_gpu.domain.gpu import MigPart, Unit
from nri_gpu.domain.gpu_request import Claim, Count, Devices, Mode
from nri_gpu.domain.mps import MIB, Seat
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.holders import Usage
from nri_gpu.ledger.ledger import Ledger

# Clients of one server, by NVIDIA's documentation of MPS: 48 from Volta on, 16 before.
CLIENTS: Final = 48
CLIENTS_BEFORE_VOLTA: Final = 16
VOLTA: Final = (7, 0)
# What helps in a cluster: no resource of a device plugin is given in this mode.
MPS_IN_CLUSTER: Final = (
    "have the policy put GPUs for annotations into a [[pool]] of their own, or ask by a ResourceClaim whose "
    "configuration has mode: mps (docs/mps.md)"
)


def single_gpu_fault(claim: Claim) -> Reason | None:
    """Return why mode=mps cannot serve a request however free the node is, or None: each GPU has its own daemon."""
    wanted = claim.wanted
    if (isinstance(wanted, Count) and wanted.gpus == 1) or (isinstance(wanted, Devices) and len(wanted.ids) == 1):
        return None
    return Reason(
        Code.BAD_REQUEST,
        "mode=mps gives a container one GPU, since each GPU has its own MPS daemon and a program reaches one",
        cure="ask for 1 or device=, or in another mode",
    )


def folder_fault(unit: Unit, unmade: Mapping[str, str]) -> Reason | None:
    """Return why no container can meet this GPU's next daemon, or None. unmade: see `MpsFolders`."""
    if why := unmade.get(unit.uuid):
        return Reason(
            Code.NODE_NOT_READY,
            f"{called(unit)} has no folder for its next MPS daemon ({why})",
            cure="make room where containers in mode=mps write (docs/mps.md), or ask with mode=shared",
        )
    return None


def seat_fault(unit: Unit, usage: Usage, seat: Seat, most: int) -> Reason | None:
    """Return why this GPU's daemon has no room for a client, or None.

    usage: without the container itself. most: policy's limit.
    """
    if isinstance(unit, MigPart):
        return Reason(
            Code.GPU_UNAVAILABLE,
            f"{called(unit)} cannot be shared by MPS here",
            cure="ask for it in mode=shared, or for a whole GPU",
        )
    others = list(usage.grants.values())
    return _too_many(unit, len(others), most) or _too_much(unit, others, seat) or _other_user(unit, others, seat.uid)


def start_fault(grant: Grant, uid: int, ledger: Ledger, inventory: Inventory) -> Reason | None:
    """Return why a granted container must not start as this user, or None.

    The user is known for certain only when the container's process exists. Memory is checked again: the grant may have
    lapsed since, and other containers may have got its share.
    """
    usage = ledger.without_containers({grant.container_id}).usage()
    seat = grant.seat or Seat()
    units = {unit.uuid: unit for unit in inventory.units}
    for uuid in grant.uuids:
        if (use := usage.get(uuid)) and (unit := units.get(uuid)):
            others = list(use.grants.values())
            if fault := _too_much(unit, others, seat) or _other_user(unit, others, uid):
                return fault
    return None


def _too_many(unit: Unit, others: int, most: int) -> Reason | None:
    limit = min(most, CLIENTS if unit.arch and unit.arch >= VOLTA else CLIENTS_BEFORE_VOLTA)
    if others < limit:
        return None
    return Reason(
        Code.OVER_LIMIT,
        f"{called(unit)} has {others} MPS clients, the most allowed (mps.containers_per_gpu, or the hardware's limit)",
        cure="wait until one ends, or ask for another GPU",
    )


def _too_much(unit: Unit, others: Iterable[Grant], seat: Seat) -> Reason | None:
    if seat.memory_mib and unit.memory_bytes is None:
        return Reason(
            Code.NO_SUCH_GPU,
            f"{called(unit)} cannot be shared by memory, since {MEMORY_UNKNOWN}",
            cure="ask without sharing=memory, where the policy sets no share either (mps.default_memory_mib, "
            "mps.most_memory_mib), or for another GPU",
        )
    taken, there = sum(grant.seat.memory_mib for grant in others if grant.seat), (unit.memory_bytes or 0) // MIB
    if not seat.memory_mib or taken + seat.memory_mib <= there:
        return None
    return Reason(
        Code.OVER_LIMIT,
        f"{called(unit)} has {there} Mi of memory, of which {taken} Mi are shares of other containers already, and "
        f"{seat.memory_mib} Mi are asked for",
        cure="ask for a smaller sharing=memory, wait, or ask for another GPU",
    )


def _other_user(unit: Unit, others: Iterable[Grant], uid: int | None) -> Reason | None:
    known = sorted({grant.seat.uid for grant in others if grant.seat and grant.seat.uid is not None})
    if uid is None or not known or known == [uid]:
        return None
    return Reason(
        Code.GPU_BUSY,
        f"the MPS daemon of {called(unit)} serves user id {known[0]} now, and this container runs as {uid}",
        "one daemon serves one user at a time, and CUDA would hang",
        "run it as that user, wait, or ask for another GPU",
    )


def holds_by_mps(grant: Grant) -> bool:
    """Return whether the grant is a share of an MPS daemon."""
    return grant.mode is Mode.MPS and bool(grant.uuids)


def uses_mps(ledger: Ledger) -> bool:
    """Return whether a container, a reservation or a claim has a GPU by MPS, even by a grant that has lapsed."""
    return (
        any(holds_by_mps(entry.grant) for entry in ledger.entries.values())
        or any(each.mode is Mode.MPS for each in ledger.reservations.values())
        or any(Mode.MPS in claim.holds.values() for claim in ledger.claims.values())
    )
