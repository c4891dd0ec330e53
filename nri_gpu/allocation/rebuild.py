"""The ledger built anew when the runtime lists its containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from nri_gpu.allocation.ledger import (
    UNUSED,
    Entry,
    ExternalAllocation,
    GrantPhase,
    Ledger,
    Live,
    Releasing,
    Reservation,
    taken,
)
from nri_gpu.allocation.messages import opener
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim


def overlaps(ledger: Ledger) -> Mapping[GpuUuid, tuple[str, ...]]:
    """GPUs that pods were granted beside each other, one of them exclusively, and by no common claim; with the pods.

    A container that started while we were away may have brought it about, or a monitor that is none any more, which
    holds again what another pod was granted meanwhile. Nobody else is granted such a GPU.
    """
    found: dict[GpuUuid, tuple[str, ...]] = {}
    for uuid, use in ledger.usage().items():
        pods = {each.pod_uid: each.pod for each in use.grants.values()}
        exclusive = any(each.mode is Mode.EXCLUSIVE for each in use.grants.values())
        joined = any(pods.keys() <= each.claim.pods.keys() for each in use.claims.values())
        back = {
            opener(each) for each in use.external.values() if uuid in each.regained and each.pod not in pods.values()
        }
        if exclusive and (back or (len(pods) > 1 and not joined)):
            found[uuid] = tuple(sorted({*pods.values(), *back}))
    return found


def rebuilt(
    entries: Iterable[Entry],
    external: Iterable[ExternalAllocation],
    releasing: Mapping[GpuUuid, Releasing] = MappingProxyType({}),
    live: Iterable[Live] = (),
    reservations: Iterable[Reservation] = (),
    claims: Mapping[ClaimUid, PreparedClaim] = MappingProxyType({}),
) -> Ledger:
    """The ledger as the runtime's list of containers shows it, at Synchronize.

    The list does not say which created containers had lapsed. One whose GPUs another container holds has; of two
    created ones the first in the list holds. One whose GPUs nobody took holds them again, for another grace. External
    allocations do not count here: they may have come after the grant.
    external, releasing, reservations, claims: of the ledger so far, since no list shows them. A reservation gives way
    to grants.
    """
    listed = tuple(entries)
    kept = {entry.grant.container_id: entry for entry in listed if entry.ran}
    usage = dict(Ledger(kept, releasing=releasing, claims=claims).usage())
    for entry in (entry for entry in listed if not entry.ran):
        gone = entry.phase is GrantPhase.CREATED and taken(entry.grant, usage)
        kept[entry.grant.container_id] = entry.lapsed(entry.since) if gone else entry
        if kept[entry.grant.container_id].holds:
            for uuid in entry.grant.held:
                use = usage.get(uuid, UNUSED)
                usage[uuid] = replace(use, grants={**use.grants, entry.grant.container_id: entry.grant})
    return Ledger(
        kept,
        {other.container_id: other for other in external},
        releasing,
        {each.container_id: each for each in live},
        {
            each.device: each
            for each in reservations
            if not usage.get(each.device.uuid, UNUSED).held_from(each.mode, each.pod_uid)
        },
        claims,
    )
