"""The ledger built anew when the runtime lists its containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.ledger import (
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
