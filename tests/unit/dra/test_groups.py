"""Claims that are reserved for a PodGroup: its pods have them, by the kubelet's word, and nobody else has."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.decision.overlaps import overlaps
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.policy.read import parse_policy
from tests.support.builders import container, pod, uuid
from tests.support.claim_nodes import ClaimNode, allocated, with_claims

GANG = allocated(0, pods=(), groups=("gang",))
WORKERS = ("a", "b", "c")
NOT_LISTED = "the kubelet's PodResources does not list it for this container"


@pytest.fixture
def node() -> ClaimNode:
    return ClaimNode()


def member(node: ClaimNode, claim: PreparedClaim, name: str, container_name: str = "main") -> Container:
    """A container of a pod of the group, whose sandbox was created and about which the kubelet has answered."""
    made = with_claims(container(of=name, name=container_name), claim)
    node.sandbox_created(made.pod)
    node.kubelet_lists(made.pod, **{container_name: [claim]})
    return made


def test_each_pod_of_the_group_has_the_claim_and_no_other_pod(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    for name in WORKERS:
        made = member(node, claim, name)
        assert node.create(made) == (uuid(0),)
        assert node.start(made)
    assert {each.mode for each in node.plugin.ledger.usage()[uuid(0)].holders} == {Mode.EXCLUSIVE}
    assert not overlaps(node.plugin.ledger)
    # Whether it is in no group, or names it in its manifest or an annotation: the kubelet lists nothing for it.
    thief = with_claims(container("all", of="thief"), claim)
    node.sandbox_created(thief.pod)
    node.kubelet_lists(thief.pod, main=[])
    assert NOT_LISTED in node.refused(thief)
    stranger = with_claims(container(of=pod("b", namespace="other", uid="uid-x")), claim)
    assert "this pod copied their variable" in node.refused(stranger)
    assert "is held exclusively by ml/" in node.refused(container("device=0", of="annotated"))


def test_before_the_kubelet_has_answered_a_container_waits(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    made = with_claims(container(of="a"), claim)
    node.sandbox_created(made.pod)
    assert [each.name for each in node.pods.questions] == ["a"]  # asked before the container comes
    assert "has not said yet" in node.refused(made)
    node.kubelet_lists(made.pod)  # it does not know the pod yet
    assert "has not said yet" in node.refused(made)
    node.kubelet_lists(made.pod, main=[claim])
    assert node.create(made) == (uuid(0),)


def test_the_kubelet_is_asked_again_where_it_did_not_list_the_claim_and_only_there(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    made = with_claims(container(of="a"), claim)
    node.sandbox_created(made.pod)
    node.kubelet_lists(made.pod, main=[])
    assert NOT_LISTED in node.refused(made)
    node.kubelet_lists(made.pod, main=[claim])
    assert node.create(made) == (uuid(0),)
    assert not node.pods.questions


def test_a_container_beside_one_that_names_the_claim_has_nothing_of_it(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    main, side, first = (with_claims(container(of="a", name=name), claim) for name in ("main", "side", "first"))
    node.sandbox_created(main.pod)
    node.kubelet_lists(main.pod, main=[claim], side=[])
    assert node.create(main) == (uuid(0),)
    assert NOT_LISTED in node.refused(side)
    assert node.create(first) == (uuid(0),)  # a plain init container, of which PodResources has none


def test_a_pod_without_uid_is_of_no_group(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    nameless = with_claims(container(of=pod("a", uid="")), claim)
    node.sandbox_created(nameless.pod)
    node.kubelet_lists(nameless.pod, main=[claim])
    assert "has not said yet" in node.refused(nameless)


def test_pods_of_the_group_outlive_the_daemon(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    members = [member(node, claim, name) for name in WORKERS]
    for each in members:
        node.create(each)
        node.start(each)
    node.restarted({each.id: (each, True) for each in members})
    assert not overlaps(node.plugin.ledger)
    node.stop(members[0])
    again = replace(members[0], id=ContainerId("again"))
    assert node.create(again) == (uuid(0),)  # whether the kubelet answers or not
    late = with_claims(container(of="late"), claim)
    assert "has not said yet" in node.refused(late)  # its sandbox came while the daemon was away
    node.kubelet_lists(late.pod, main=[claim])
    assert node.create(late) == (uuid(0),)


def test_who_runs_keeps_the_claim_when_it_is_reserved_for_others(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    first = member(node, claim, "a")
    node.create(first)
    node.start(first)
    anew = node.prepared(replace(allocated(0, pods=("plain",), groups=("other",)), others=("jobs.batch",)))
    assert set(anew.pods.values()) == {"a", "plain"}
    assert node.create(with_claims(container(of="plain"), anew)) == (uuid(0),)
    node.stop(first)
    assert node.create(replace(first, id=ContainerId("again"))) == (uuid(0),)
    assert node.prepared(allocated(0, pods=("a",))).members == {}  # reserved for it by itself now


def test_pods_that_are_gone_are_forgotten_once_another_comes(node: ClaimNode) -> None:
    claim = node.prepared(GANG)
    for number in range(50):
        made = member(node, claim, f"pod-{number}")
        assert node.create(made) == (uuid(0),)
        node.end_pod(made)
    left = node.plugin.ledger.claims[claim.uid]
    assert len(left.pods) == len(left.members) == 1


def test_a_limit_counts_the_claim_once_in_its_namespace(node: ClaimNode) -> None:
    limits = {"gpus_per_namespace": 1, "exclusive_gpus_per_namespace": 1}
    node.node_state.use(parse_policy({"limits": limits}, "test"))
    claim = node.prepared(GANG)
    for name in WORKERS:
        assert node.create(member(node, claim, name)) == (uuid(0),)
    assert node.not_prepared(allocated(1, name="next", pods=("d",))).reason.code is Code.OVER_LIMIT


@pytest.mark.parametrize("pods", [(), ("named",)])
def test_policy_is_asked_for_the_namespace_before_anything_is_held(node: ClaimNode, pods: tuple[str, ...]) -> None:
    rules = [{"namespace": ["ml"], "allow": False, "reason": "no gangs here"}]
    node.node_state.use(parse_policy({"rule": rules}, "test"))
    refused = node.not_prepared(allocated(0, pods=pods, groups=("gang",)))
    assert "no gangs here" in refused.reason.sentence
    assert not node.plugin.ledger.claims


def test_policy_by_the_names_of_pods_is_asked_for_each(node: ClaimNode) -> None:
    rules = [{"pod": ["b*"], "allow": False, "reason": "not b"}]
    node.node_state.use(parse_policy({"rule": rules}, "test"))
    claim = node.prepared(GANG)
    assert node.create(member(node, claim, "a")) == (uuid(0),)
    assert "not b" in node.refused(member(node, claim, "b"))
