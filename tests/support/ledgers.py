"""Ledgers after events."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.decision import Decision, Inject
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.events import ClaimPrepared, ClaimReleased, LedgerEvent, Rules
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from tests.support import builders

GRACE_S: Final = 60.0
RULES: Final = Rules(GRACE_S, builders.inventory())


def after(ledger: Ledger, *events: LedgerEvent, rules: Rules = RULES) -> Ledger:
    """The ledger after these, one after the other."""
    for event in events:
        ledger = apply(ledger, event, rules)
    return ledger


def decided(ledger: Ledger, decision: Decision, now: float) -> Ledger:
    """With what was decided; only an Inject changes it."""
    if not isinstance(decision, Inject):
        return ledger
    return ledger.with_entry(Entry(decision.grant, GrantPhase.CREATED, now))


def prepared(ledger: Ledger, claim: PreparedClaim) -> Ledger:
    """With that claim prepared."""
    return after(ledger, ClaimPrepared(0.0, claim))


def unprepared(ledger: Ledger, uid: ClaimUid) -> Ledger:
    """Without that one."""
    return after(ledger, ClaimReleased(0.0, uid))
