"""Prepared claims in the ledger: each holds its GPUs until it is unprepared, whether containers have them or not."""

from __future__ import annotations

from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim


def prepare(ledger: Ledger, claim: PreparedClaim) -> Ledger:
    """With that claim, in place of any with its UID."""
    if ledger.claims.get(claim.uid) == claim:
        return ledger
    return replace(ledger, claims={**ledger.claims, claim.uid: claim})


def unprepare(ledger: Ledger, *uids: ClaimUid) -> Ledger:
    """Without these claims; others change nothing. What their pods' containers have, those hold until they end."""
    gone = ledger.claims.keys() & set(uids)
    if not gone:
        return ledger
    return replace(ledger, claims={uid: each for uid, each in ledger.claims.items() if uid not in gone})
