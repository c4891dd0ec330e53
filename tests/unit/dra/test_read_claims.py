"""Containers of ResourceClaims, from CreateContainer on: who gets what a claim has, and who is refused and why."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, ClaimUid, ContainerDevices, PodDevices
from nri_gpu.domain.container import MARKERS_MAX, Container, ContainerId, PodUid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.domain.names import GRANT_KEY, MARKER_PREFIX
from nri_gpu.dra.markers import markers_of
from nri_gpu.dra.read_claims import TOO_MANY
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.policy.read import parse_policy
from nri_gpu.system.state import Changed
from tests.support.builders import container, create_payload, gpu, pod, uuid
from tests.support.claim_nodes import ClaimNode, allocated, with_claims
from tests.support.kubelet_nodes import nodes_of, reply_of, token
from tests.support.plugin import KEY

UVM = "/dev/nvidia-uvm"
SHARED = ClaimUid("claim-shared")


@pytest.fixture
def node() -> ClaimNode:
    return ClaimNode()


def test_a_container_gets_what_its_claim_has_and_the_mount_goes(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0, 2))
    reply = reply_of(node, with_claims(container(mounts=frozenset({REQUIRED_DESTINATION})), claim))
    assert {"/dev/nvidia7", "/dev/nvidia5", UVM} <= nodes_of(reply)
    assert "/dev/nvidia6" not in nodes_of(reply)
    assert f"-{REQUIRED_DESTINATION}" in {each.destination for each in reply.adjust.mounts}
    grant = node.plugin.ledger.entries[ContainerId("train.main")].grant
    assert (grant.uuids, grant.mode) == ((uuid(0), uuid(2)), Mode.EXCLUSIVE)
    assert sign_grant(grant, KEY) == reply.adjust.annotations[GRANT_KEY]


def test_each_container_gets_the_devices_that_it_names(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0, 2))
    name, value = markers_of(claim, KEY)[1]
    assert node.create(container(markers={name: value})) == (uuid(2),)
    assert node.create(container(name="none")) == ()


def test_more_devices_than_a_container_can_have_are_refused_by_number(node: ClaimNode) -> None:
    flood = {f"{MARKER_PREFIX}{number}": "v1" for number in range(MARKERS_MAX + 1)}
    refused = node.create(container(markers=flood))
    assert refused == f"nri-gpu [bad-request]: {MARKER_PREFIX}0: {TOO_MANY}."


def test_the_claims_that_hold_a_gpu_are_named_where_nobody_else_does(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0, pods=("train",)))
    other = allocated(0, name="next", pods=("next",))
    assert node.not_prepared(other).holders == (claim,)
    node.create(with_claims(container(), claim))
    assert node.not_prepared(other).holders == (claim,)
    node.prepared(allocated(0, pods=("eval",)))  # what runs is no pod of it any more, and does not end with it
    assert node.not_prepared(other).holders == ()
    assert node.create(container("device=1", of="annotated")) == (uuid(1),)
    assert node.not_prepared(allocated(1, name="next", pods=("next",))).holders == ()


def test_released_gpus_wait_for_others_and_not_for_the_claims_own_pods() -> None:
    node = ClaimNode()
    node.put_gpus(node.node.inventory.gpus, simulated=False)
    claim = node.prepared(allocated(0, pods=("train", "eval")))
    made = with_claims(container(), claim)
    node.create(made)
    node.start(made)
    node.stop(made)
    assert node.create(with_claims(container(of="eval"), claim)) == (uuid(0),)
    node.stop(container(of="eval"))
    node.unprepare(SHARED)
    waits = node.not_prepared(allocated(0, name="next", pods=("next",)))
    assert waits.passing
    assert "was just released by ml/train" in waits.reason.sentence


def test_configuration_shapes_and_annotations_shape_what_has_none(node: ClaimNode) -> None:
    shaped = node.prepared(allocated(0, text="mode=shared;capabilities=utility"))
    reply = reply_of(node, with_claims(container(), shaped))
    assert UVM not in nodes_of(reply)  # which is for compute
    assert node.plugin.ledger.entries[ContainerId("train.main")].grant.mode is Mode.SHARED
    both = node.refused(with_claims(container("all;capabilities=compute", name="both"), shaped))
    assert "adds a request to that of claim ml/shared, which has configuration of its own" in both
    plain = node.prepared(allocated(1, name="plain"))
    reply = reply_of(node, with_claims(container("all;capabilities=utility", name="plain"), plain))
    assert UVM not in nodes_of(reply)  # which is for compute
    for asked, cure in (
        ("2", "ask for the same number in the ResourceClaim"),
        ("all;mode=shared", "the ResourceClaim's conf"),
    ):
        assert cure in node.refused(with_claims(container(asked, name="more"), plain))
    assert node.create(with_claims(container("none", name="none"), plain)) == ()


def test_monitoring_gets_nodes_beside_whoever_holds_the_gpu_and_holds_nothing(node: ClaimNode) -> None:
    assert node.create(container("device=0", of="other")) == (uuid(0),)
    claim = node.prepared(allocated(0, admin=True))
    reply = reply_of(node, with_claims(container(), claim))
    assert "/dev/nvidia7" in nodes_of(reply)
    assert UVM not in nodes_of(reply)  # which is for compute
    entry = node.plugin.ledger.entries[ContainerId("train.main")]
    assert (entry.grant.uuids, entry.grant.mode) == ((uuid(0),), None)
    assert not node.plugin.ledger.external
    assert list(node.plugin.ledger.usage()[uuid(0)].grants) == [ContainerId("other.main")]
    node.stop(container(of="other"))
    assert node.create(container("device=0", of="third")) == (uuid(0),)
    refused = node.refused(with_claims(container("all;capabilities=compute", name="more"), claim))
    assert "which is for monitoring" in refused


def test_a_gpu_that_a_claim_has_twice_is_granted_once(node: ClaimNode) -> None:
    """As where two requests of one claim are allocated shares of one device."""
    claim = node.prepared(allocated(0, 0, text="mode=shared"))
    assert node.create(with_claims(container(), claim)) == (uuid(0),)
    for name, marker in zip(("one", "two"), markers_of(claim, KEY), strict=True):
        assert node.create(container(name=name, markers=dict([marker]))) == (uuid(0),)


def test_containers_of_claims_share_one_mps_daemon() -> None:
    node = ClaimNode(parse_policy({"mps": {"enabled": True}}, "test"))
    text = "mode=mps;sharing=memory:10Gi"
    claims = [node.prepared(allocated(0, name=name, pods=(name,), text=text)) for name in ("one", "two")]
    for claim in claims:
        of_claim = container(of=claim.name, uid=1000)
        assert node.create(with_claims(of_claim, claim)) == (uuid(0),)
        assert node.plugin.ledger.entries[of_claim.id].grant.mode is Mode.MPS
    assert "in mps mode" in str(node.not_prepared(allocated(0, name="other")))
    both = node.prepared(allocated(1, 2, name="both", text=text))
    assert "mode=mps gives a container one GPU" in node.refused(with_claims(container(), both))


def test_monitoring_is_for_gpus_that_are_ill_above_all(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0, admin=True))
    bad = gpu(0, unavailable="XID 79", health=Health(HealthState.BAD, 1.0, "XID 79"))
    node.put_gpus((bad, *node.node.inventory.gpus[1:]))
    assert "XID 79" in node.refused(container("device=0", of="other"))
    assert node.create(with_claims(container(), claim)) == (uuid(0),)


@pytest.mark.parametrize(("forged", "why"), [(1, "not written by nri-gpu for this node"), (200, "more than 128 dev")])
def test_a_valid_marker_beside_forged_ones_gives_nothing(node: ClaimNode, forged: int, why: str) -> None:
    """What is no marker is in test_markers."""
    claim = node.prepared(allocated(0))
    markers = {f"NRI_GPU_CLAIM_{number}": "v1" for number in range(forged)}
    refused = node.refused(with_claims(container(markers=markers), claim))
    assert refused.startswith("nri-gpu [bad-request]: NRI_GPU_CLAIM_")
    assert why in refused
    assert not node.plugin.ledger.entries


def test_a_copied_marker_is_worth_nothing_in_another_pod(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    elsewhere = container(of=pod("thief", namespace="other"))
    assert "it is reserved for other pods" in node.refused(with_claims(elsewhere, claim))
    assert node.plugin.ledger.in_question == frozenset()


@pytest.mark.parametrize("owned", [False, True], ids=["of nobody", "that goes with its driver's pod"])
def test_a_pod_that_is_new_to_a_shared_claim_waits_until_it_is_read_again(node: ClaimNode, owned: bool) -> None:
    told: list[frozenset[ClaimUid]] = []
    claim = node.prepared(allocated(0, owned=owned))
    node.node_state.then(lambda: told.append(node.plugin.ledger.in_question), Changed.LEDGER)
    late = with_claims(container(of="late"), claim)
    refused = node.refused(late)
    assert refused.startswith("nri-gpu [node-not-ready]: claim ml/shared: this pod was not among those")
    node.refused(late)
    assert told == [{SHARED}]
    node.prepared(allocated(0, pods=("train", "late"), owned=owned))
    assert told == [{SHARED}, frozenset()]
    assert node.create(late) == (uuid(0),)


def test_the_sandbox_of_a_new_pod_has_shared_claims_of_its_namespace_read_again(node: ClaimNode) -> None:
    node.prepared(allocated(0))
    node.prepared(allocated(1, name="owned", owned=True))
    node.prepared(allocated(2, name="elsewhere", namespace="other"))
    node.sandbox_created(pod("train"))
    assert node.plugin.ledger.in_question == frozenset()
    node.sandbox_created(pod("late"))
    assert node.plugin.ledger.in_question == {SHARED}
    node.unprepare(SHARED)
    assert node.plugin.ledger.in_question == frozenset()


def test_what_is_not_prepared_any_more_is_refused(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    node.unprepare(SHARED)
    refused = node.refused(with_claims(container(), claim))
    assert "is no longer prepared on this node: delete the pods that use it, all of them" in refused


def test_a_lost_gpu_of_a_claim_is_exchanged_by_all_its_pods(node: ClaimNode) -> None:
    """A claim that another pod still has keeps its allocation."""
    claim = node.prepared(allocated(0))
    for gpus in ([gpu(0, unavailable="GPU is lost")], [gpu(1)]):
        node.put_gpus(gpus)
        assert "delete the pod, or all pods that use its ResourceClaim" in node.refused(with_claims(container(), claim))


def test_one_container_has_gpus_by_one_way_alone(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    assert "of a device plugin and of a ResourceClaim" in node.refused(
        with_claims(container(annotations=token(1)), claim)
    )
    for other in (
        allocated(1, name="mode", text="mode=shared"),
        allocated(1, name="text", text="capabilities=utility"),
        allocated(1, name="admin", admin=True),
    ):
        assert "are configured differently" in node.refused(with_claims(container(), claim, node.prepared(other)))
        node.unprepare(other.uid)
    alike = node.prepared(allocated(1, name="alike"))
    assert node.create(with_claims(container(), claim, alike)) == (uuid(0), uuid(1))


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"namespaces": {"allow": ["*"], "deny": ["ml"]}}, 'namespace \\"ml\\" may not ask'),
        ({"namespaces": {"allow": ["x"], "otherwise": "ignore"}}, "take the claim out of its resources.claims"),
        ({"rule": [{"allow": False, "container": "main"}]}, "denies it"),
        ({"limits": {"gpus_per_container": 1}}, "a container may have at most 1 GPU"),
    ],
)
def test_policy_is_asked_for_each_container(node: ClaimNode, policy: dict[str, Any], why: str) -> None:
    claim = node.prepared(allocated(0, 1))
    node.node_state.use(parse_policy(policy, "test"))
    assert why.replace("\\", "") in node.refused(with_claims(container(), claim))


def test_a_limit_counts_a_claims_gpus_once(node: ClaimNode) -> None:
    node.node_state.use(parse_policy({"limits": {"gpus_per_namespace": 2, "containers_per_gpu": 1}}, "test"))
    claim = node.prepared(allocated(0, 1))
    assert node.create(with_claims(container(), claim)) == (uuid(0), uuid(1))
    assert "at most 2 GPUs, of which 2 are held already" in node.refused(container("device=2", of="other"))
    shared = node.prepare(allocated(2, name="more"))
    assert "this claim asks for 1 more" in str(shared)


@pytest.mark.parametrize("limit", ["gpus_per_pod", "gpus_per_node"])
def test_a_pods_claim_counts_as_held_by_the_pod_and_on_the_node(node: ClaimNode, limit: str) -> None:
    node.node_state.use(parse_policy({"limits": {limit: 1}}, "test"))
    claim = node.prepared(allocated(0))
    asking = pod(annotations={"gpu.nri.io/container.main": "1"})  # the whole pod's would only shape the claim
    assert "of which 1 is held already" in node.refused(container(of=asking))
    assert node.create(with_claims(container(), claim)) == (uuid(0),)


def test_a_claim_has_its_place_on_a_shared_gpu(node: ClaimNode) -> None:
    node.node_state.use(parse_policy({"limits": {"containers_per_gpu": 1}}, "test"))
    claim = node.prepared(allocated(0, text="mode=shared"))
    assert "[over-limit]" in node.refused(container("device=0;mode=shared", of="other"))
    assert node.create(with_claims(container(), claim)) == (uuid(0),)
    assert "[over-limit]" in node.refused(with_claims(container(name="side"), claim))


@pytest.mark.parametrize(
    "policy",
    [
        {"modes": {"allowed": ["mps"]}, "defaults": {"mode": "mps"}},
        {"limits": {"gpus_per_namespace": 1}},
        {"defaults": {"extras": ["drm"]}},
    ],
)
def test_monitoring_has_no_mode_no_extras_and_counts_in_no_limit(node: ClaimNode, policy: dict[str, Any]) -> None:
    node.prepared(allocated(1, name="first"))
    node.node_state.use(parse_policy(policy, "test"))
    claim = node.prepared(allocated(0, admin=True))
    assert node.create(with_claims(container(), claim)) == (uuid(0),)


def test_a_marker_of_an_earlier_allocation_names_nothing(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0, 2))
    node.unprepare(SHARED)
    node.prepared(allocated(0))
    assert "is no longer prepared on this node" in node.refused(with_claims(container(), claim))


def test_what_podresources_lists_is_not_asked_of_claims(node: ClaimNode) -> None:
    made = with_claims(container(), node.prepared(allocated(0)))
    pods = node.plugin.external.pods = KubeletPods()
    pods.add(made.pod)
    pods.put(made.pod, PodDevices("ml", "train", (ContainerDevices("main"),)))
    assert node.create(made) == (uuid(0),)


def test_a_container_made_without_us_does_not_start(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    assert not node.start(with_claims(container(), claim))
    assert not node.start(container(markers={"NRI_GPU_CLAIM_X": "forged"}))


def test_a_pod_without_uid_is_in_no_claim(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    nameless: Container = container(of=pod("train", uid=PodUid("")))
    assert "this pod was not among those" in node.refused(with_claims(nameless, claim))


def test_the_last_of_a_name_counts_as_in_the_program(node: ClaimNode) -> None:
    claim = node.prepared(allocated(0))
    ((name, value),) = markers_of(claim, KEY)
    payload = pb.CreateContainerRequest.FromString(create_payload(container()))
    payload.container.env.extend([f"{name}=v1;forged", *[f"{name}={value}"] * 300])
    assert isinstance(node.plugin.create_container(payload.SerializeToString()), bytes)
    payload.container.id = "again"
    payload.container.env.append(f"{name}=v1;forged")
    assert not isinstance(node.plugin.create_container(payload.SerializeToString()), bytes)
