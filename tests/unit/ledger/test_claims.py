"""Prepared claims in the ledger: whom they keep from their GPUs, and what happens to everything else beside them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import busy
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu_request import Count, Devices, Mode
from nri_gpu.ledger.events import PodGone, Stopped, Synchronized, Ticked
from nri_gpu.ledger.holders import UNUSED, Releasing, Usage
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.request.annotation import parse_claim
from tests.support.builders import container, entry, foreign, gpu, inventory, ledger, prepared_claim, uuid
from tests.support.ledgers import after, prepared, unprepared

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


def test_pods_of_one_claim_share_what_it_has_exclusively() -> None:
    held = prepared(ledger(entry(0)), prepared_claim(0, pods=("train", "other")))
    assert not use(held).blocks(Mode.EXCLUSIVE, OTHER, {SHARED})
    assert use(held).blocks(Mode.EXCLUSIVE, PodUid("uid-third"), {SHARED})
    assert use(held).load == 1  # its container, and not the claim once more
    just_released = held.without_containers({ContainerId("train.main")}).with_releasing(
        {uuid(0): Releasing(TRAIN, "ml/train", 1, 9)}
    )
    assert not use(just_released).blocks(Mode.EXCLUSIVE, OTHER, {SHARED})
    assert use(unprepared(just_released, SHARED)).blocks(Mode.EXCLUSIVE, OTHER, NO_CLAIMS)


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.MPS])
def test_a_claim_in_another_mode_shares_with_that_mode(mode: Mode) -> None:
    held = use(prepared(Ledger(), prepared_claim(0, mode=mode)))
    assert [each for each in Mode if not held.blocks(each, OTHER, NO_CLAIMS)] == [mode]
    assert not held.held_from_claim(prepared_claim(0, name="second", mode=mode), mode)


def test_two_claims_never_have_one_gpu_exclusively_whatever_their_pods() -> None:
    held = prepared(Ledger(), prepared_claim(0))
    second = prepared_claim(0, name="second")
    assert use(held).held_from_claim(second, Mode.EXCLUSIVE)
    assert not use(held).held_from_claim(prepared_claim(0), Mode.EXCLUSIVE)  # itself
    assert use(prepared(held, second)).blocks(Mode.EXCLUSIVE, TRAIN, {SHARED})  # were it so, it would not be used


def test_a_claim_gets_no_gpu_that_others_have() -> None:
    wanted = prepared_claim(0)
    for others in (ledger(entry(0, to=container(of="other"))), ledger(others=[foreign(0)])):
        assert use(others).held_from_claim(wanted, Mode.EXCLUSIVE)
    assert not use(ledger(entry(0))).held_from_claim(wanted, Mode.EXCLUSIVE)  # its own pod, from before a lost state


def test_what_is_monitored_is_held_by_nobody() -> None:
    watching = prepared_claim(0, admin=True)
    granted = ledger(entry(0, mode=None))
    assert prepared(granted, watching).usage() == {}
    assert granted.entries[ContainerId("train.main")].grant.uuids == (uuid(0),)


def test_preparing_again_replaces_and_unpreparing_again_changes_nothing() -> None:
    once = prepared(Ledger(), prepared_claim(0))
    assert prepared(once, prepared_claim(0)) is once
    assert prepared(once, prepared_claim(0, pods=("train", "other"))).claims[SHARED].pods.keys() == {TRAIN, OTHER}
    gone = unprepared(once, SHARED)
    assert gone == Ledger()
    assert unprepared(gone, SHARED) is gone


def test_a_container_that_lapsed_does_not_start_on_a_claims_gpu() -> None:
    held = prepared(ledger(entry(0, phase=GrantPhase.LAPSED, to=container(of="other"))), prepared_claim(0))
    assert not held.may_start(ContainerId("other.main"))
    own = prepared(ledger(entry(0, phase=GrantPhase.LAPSED)), prepared_claim(0))
    assert own.may_start(ContainerId("train.main"))


def test_claims_outlive_whatever_happens_to_containers() -> None:
    claims = {SHARED: prepared_claim(0)}
    held = prepared(ledger(entry(0), entry(1, to=container(of="other"))), claims[SHARED])
    for event in (
        Ticked(1e6),
        Stopped(1.0, ContainerId("train.main")),
        PodGone(1.0, container().pod.id),
        Synchronized(1.0),
    ):
        assert after(held, event).claims == claims


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


def test_an_annotation_is_placed_beside_claims_and_a_claim_on_its_own() -> None:
    held = prepared(Ledger(), prepared_claim(0))
    asked = parse_claim("gpu.nri.io", "1")
    assert isinstance(asked.wanted, Count)
    placed = place(asked, Asker(TRAIN, Mode.EXCLUSIVE), inventory(), held.usage())
    assert isinstance(placed, tuple)
    assert placed[0].uuid != uuid(0)
    of_claim = replace(asked, wanted=Devices((uuid(0),)))
    assert place(of_claim, Asker(TRAIN, Mode.EXCLUSIVE, claims={SHARED}), inventory(), held.usage()) == (gpu(0),)
