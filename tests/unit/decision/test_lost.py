"""The next attempt at a lost container: it gets that one's GPUs, the two count once, and all others wait for both."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import Allocated, AllocatedDevice, ClaimUid
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Inject, Refuse
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import Limits
from tests.support import builders as make
from tests.support.ledgers import decided as with_decision

LOST = make.entry(2, 3, phase=GrantPhase.LOST)
SHARED = make.entry(2, phase=GrantPhase.LOST, mode=Mode.SHARED)


def again(claim: str | None = None, **fields: Any) -> Container:  # noqa: ANN401 - any field of a Container
    return make.container(claim, id=ContainerId("again"), **fields)


def refusal(container: Container, ledger: Ledger) -> str:
    decision = decided(container, ledger)
    assert isinstance(decision, Refuse), decision
    return decision.reason.sentence


def decided(container: Container, ledger: Ledger, policy: Policy | None = None) -> Decision:
    return decide(container, make.node(), ledger, policy or Policy.default())


def granted(decision: Decision) -> tuple[GpuUuid, ...]:
    assert isinstance(decision, Inject), decision
    return decision.grant.uuids


@pytest.mark.parametrize(
    ("claim", "indices"),
    [("2", (2, 3)), ("1", (2,)), ("device=2,3", (2, 3)), ("all", (0, 1, 2, 3))],
)
def test_it_gets_these_gpus(claim: str, indices: tuple[int, ...]) -> None:
    assert granted(decided(again(claim), make.ledger(LOST))) == tuple(map(make.uuid, indices))


@pytest.mark.parametrize("key", ["gpus_per_pod", "gpus_per_namespace", "gpus_per_node"])
def test_they_count_once(key: str) -> None:
    policy = Policy(limits=Limits(**{key: 2}))
    assert granted(decided(again("2"), make.ledger(LOST), policy)) == (make.uuid(2), make.uuid(3))


def test_they_share_a_gpu_as_one() -> None:
    policy = Policy(limits=Limits(containers_per_gpu=1))
    attempt = again("device=2;mode=shared")
    decision = decided(attempt, make.ledger(SHARED), policy)
    assert granted(decision) == (make.uuid(2),)
    both = with_decision(make.ledger(SHARED), decision, 1.0)
    assert both.usage()[make.uuid(2)].load == 1
    twice = Policy(limits=Limits(containers_per_gpu=2))
    assert granted(decided(make.container("device=2;mode=shared", of="other"), both, twice)) == (make.uuid(2),)


def test_others_wait_for_both() -> None:
    """Also once the next attempt has ended."""
    both = with_decision(make.ledger(LOST), decided(again("2"), make.ledger(LOST)), 1.0)
    other = make.container("device=2", of="other")
    assert "exclusively by ml/train," in refusal(other, both)
    assert "ml/train (ended, but its processes live on" in refusal(
        other, both.without_containers({ContainerId("again")})
    )


def test_a_lost_container_itself_is_granted_nothing() -> None:
    assert "an earlier container with this id has ended" in refusal(make.container("2"), make.ledger(LOST))


def test_what_the_kubelet_or_a_claim_allocated_is_these_gpus() -> None:
    device = AllocatedDevice("nvidia.com/gpu", make.uuid(2))
    lost = make.entry(2, phase=GrantPhase.LOST)
    for allocation in (Allocated((device,)), Allocated((device,), claims=(ClaimUid("uid"),))):
        policy = Policy(limits=Limits(gpus_per_pod=1))
        attempt = again(kubelet=allocation)
        assert granted(decided(attempt, make.ledger(lost), policy)) == (make.uuid(2),)
