"""Prepared claims in the ledger: whom they keep from their GPUs, and what happens to everything else beside them."""

from __future__ import annotations

import pytest

from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import busy
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.events import Synchronized
from nri_gpu.ledger.holders import UNUSED, Usage
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.request.annotation import parse_claim
from tests.support.builders import container, entry, gpu, inventory, ledger, prepared_claim, uuid
from tests.support.ledgers import after, prepared

TRAIN, OTHER = PodUid("uid-train"), PodUid("uid-other")
SHARED = ClaimUid("claim-shared")
NO_CLAIMS = frozenset[ClaimUid]()


def use(of: Ledger, index: int = 0) -> Usage:
    return of.usage().get(uuid(index), UNUSED)


@pytest.mark.parametrize("mode", list(Mode))
def test_an_exclusive_claim_keeps_its_gpu_from_all_but_its_pods(mode: Mode) -> None:
    held = use(prepared(Ledger(), prepared_claim(0)))
    assert held.mode is Mode.EXCLUSIVE
    assert held.blocks(mode, OTHER)
    assert held.blocks(mode, OTHER, {SHARED})  # a copied marker makes no difference
    assert held.blocks(mode, TRAIN, NO_CLAIMS)  # its own pod by annotation
    assert held.blocks(mode, TRAIN, {SHARED}) is (mode is not Mode.EXCLUSIVE)
    assert held.load == 1


def test_a_created_container_gives_way_to_a_claim_when_the_ledger_is_rebuilt() -> None:
    claims = {SHARED: prepared_claim(0)}
    created = [Entry(entry(0, to=container(of=name)).grant, GrantPhase.CREATED, 0.0) for name in ("other", "train")]
    anew = after(Ledger(claims=claims), Synchronized(1.0, entries=tuple(created)))
    assert {each.grant.pod_name: each.holds for each in anew.entries.values()} == {"other": False, "train": True}


def test_refusals_name_the_claim_until_a_container_of_it_has_the_gpu() -> None:
    held = prepared(Ledger(), prepared_claim(0))
    assert "is held exclusively by claim ml/shared, " in busy(gpu(0), OTHER, Mode.EXCLUSIVE, use(held)).sentence
    running = prepared(ledger(entry(0)), prepared_claim(0))
    assert "is held exclusively by ml/train, " in busy(gpu(0), OTHER, Mode.EXCLUSIVE, use(running)).sentence
    asker = Asker(OTHER, Mode.EXCLUSIVE)
    refused = place(parse_claim("gpu.nri.io", "2"), asker, inventory([gpu(0), gpu(1)]), held.usage())
    assert isinstance(refused, Reason)
    assert "held by claim ml/shared:" in refused.sentence
