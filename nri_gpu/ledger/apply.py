"""The ledger after an event. All that changes a ledger is here, and pure.

Four parts, in this order: who holds what (entries.py), what the kubelet keeps for pods (reservations.py), which GPUs
are being released (releasing.py), what NVIDIA's DRA driver prepared (prepared.py). The middle two follow from what each
container held before and holds now, wherever they can, so that no event can forget them.
"""

from __future__ import annotations

from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import Container
from nri_gpu.ledger.entries import entries_after, superseded
from nri_gpu.ledger.events import Created, FoundAtStart, LedgerEvent, Reconciled, Renumbered, Rules, Synchronized
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import seen, seen_one
from nri_gpu.ledger.prepared import prepared_after, with_prepared
from nri_gpu.ledger.releasing import releasing_after
from nri_gpu.ledger.reservations import redeemed, reservations_after


def apply(ledger: Ledger, event: LedgerEvent, rules: Rules) -> Ledger:
    """Return the ledger after an event: the same object where it changes nothing. It never raises."""
    after = entries_after(ledger, event, rules)
    after = reservations_after(ledger, after, event, rules.listed_pods)
    after = releasing_after(ledger, after, event, rules)
    after = _opened_after(prepared_after(after, event), event, rules)
    # Left out where it changes nothing: what is prepared can be a thousand devices, where many pods share claims.
    anew = isinstance(event, Reconciled | Renumbered | Synchronized) or after.prepared is not ledger.prepared
    if anew or after.external is not ledger.external:
        return with_prepared(after, rules.inventory, rules.monitors)
    return after


def cleared_for(ledger: Ledger, container: Container, now: float) -> Ledger:
    """Return the ledger that a new container is decided by: what it replaces, and what was reserved for it, is gone.

    Its own pod's containers that have the kubelet's GPUs by an earlier device plugin are in its way no more than those
    that have them by us.
    """
    ledger = redeemed(superseded(ledger, container, now), container)
    allocation = container.kubelet
    if not isinstance(allocation, Allocated) or allocation.claims:
        return ledger
    others = {
        id_: replace(each, uuids=each.uuids.difference(allocation.uuids)) if each.pod_id == container.pod.id else each
        for id_, each in ledger.external.items()
    }
    return ledger.with_all_external(others)


def _opened_after(after: Ledger, event: LedgerEvent, rules: Rules) -> Ledger:
    match event:
        case Synchronized() | Renumbered():
            return seen(after, rules.inventory, rules.monitors)
        case Created(live=live) | FoundAtStart(live=live) if live is not None:
            return seen_one(after, live, rules.inventory, rules.monitors)
        case _:
            return after
