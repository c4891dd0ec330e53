"""NodePrepareResources: which claims are prepared, and the sentence where one is not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.decision.claim_devices import NotPrepared, prepared
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import Code
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, PreparedClaim, device_name
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from tests.support.builders import container, entry, foreign, gpu, ledger, mig_gpu, mig_uuid, node, prepared_claim, uuid
from tests.support.ledgers import prepared as holding


def result(device: str = "gpu-7", **fields: Any) -> AllocatedResult:  # noqa: ANN401 - any field of a result
    return AllocatedResult(request=fields.pop("request", "gpu"), pool="node", device=device, **fields)


def allocated(*results: AllocatedResult, pods: tuple[str, ...] = ("train",), **fields: Any) -> AllocatedClaim:  # noqa: ANN401
    return AllocatedClaim(
        **{
            "uid": ClaimUid("claim-shared"),
            "namespace": "ml",
            "name": "shared",
            "pods": {PodUid(f"uid-{each}"): each for each in pods},
            "results": results or (result(),),
            **fields,
        }
    )


def _prepared(
    claim: AllocatedClaim, on: Node | None, held: Ledger | None, policy: Policy
) -> PreparedClaim | NotPrepared:
    return prepared(claim, on or node(), held or Ledger(), policy)


def done(claim: AllocatedClaim, on: Node | None = None, held: Ledger | None = None, **policy: Any) -> PreparedClaim:  # noqa: ANN401
    found = _prepared(claim, on, held, parse_policy(policy, "test"))
    assert isinstance(found, PreparedClaim), found
    return found


def why_not(claim: AllocatedClaim, on: Node | None = None, held: Ledger | None = None, **policy: Any) -> NotPrepared:  # noqa: ANN401
    found = _prepared(claim, on, held, parse_policy(policy, "test"))
    assert isinstance(found, NotPrepared), found
    return found


def test_devices_are_named_by_minor_and_by_instances() -> None:
    cut = mig_gpu(1, ("1g.10gb+me", "1c.3g.40gb"))
    assert device_name(gpu(0)) == "gpu-7"
    assert [device_name(each) for each in cut.parts] == ["gpu-6-mig-1g10gb-me-7-0", "gpu-6-mig-1c3g40gb-8-0"]


def test_a_claim_gets_the_gpus_that_its_devices_name() -> None:
    found = done(allocated(result("gpu-7"), result("gpu-5", request="second"), owned=True))
    assert found.holds == {uuid(0): Mode.EXCLUSIVE, uuid(2): Mode.EXCLUSIVE}
    assert [(each.request, each.device) for each in found.devices] == [("gpu", "gpu-7"), ("second", "gpu-5")]
    assert found.owned
    cut = node([mig_gpu(0)])
    assert done(allocated(result("gpu-7-mig-1g5gb-8-0")), cut).holds == {mig_uuid(0, 1): Mode.EXCLUSIVE}


def test_configuration_shapes_and_replicas_share() -> None:
    shaped = done(allocated(result(text="mode=shared;capabilities=utility")))
    assert shaped.devices[0].text == "mode=shared;capabilities=utility"
    assert shaped.devices[0].mode is Mode.SHARED
    assert done(allocated(), dra={"replicas": 4}).devices[0].mode is Mode.SHARED


def test_no_more_share_a_gpu_than_replicas_also_of_containers_whose_claim_is_gone() -> None:
    """The scheduler counts claims alone, and by the memory, which may be unknown."""
    on, two = node([gpu(0, memory_bytes=None)]), {"replicas": 2}
    claims = [prepared_claim(0, name=name, pods=(name,), mode=Mode.SHARED) for name in ("first", "second")]
    held = holding(holding(Ledger(), claims[0]), claims[1])
    full = why_not(allocated(), on, held, dra=two)
    assert full.reason.code is Code.GPU_BUSY
    assert full.uuid == uuid(0)
    assert "has 2 shares (dra.replicas), all taken by claim ml/first, claim ml/second:" in full.reason.sentence
    assert [each.name for each in full.holders] == ["first", "second"]
    assert done(allocated(), on, held, dra={"replicas": 3})
    assert done(allocated(result(admin=True)), on, held, dra=two)

    left = entry(0, mode=Mode.SHARED, to=container(of="second"))
    held = holding(ledger(left), claims[0])
    full = why_not(allocated(), on, held, dra=two)
    assert "all taken by ml/second, claim ml/first:" in full.reason.sentence
    assert full.holders == ()
    assert done(allocated(pods=("second",)), on, held, dra=two)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mode=exclusive", "4 claims share each GPU of this node"),
        ("device=1", "its configuration names GPUs"),
        ("1;mode=shared", "its configuration names GPUs"),
        ("memory>=40Gi", "its configuration names GPUs"),
        ("mode=half", "configuration at character 6: unknown mode"),
        ("mode=mps", "mode mps is switched off"),
    ],
)
def test_configuration_that_cannot_be(text: str, why: str) -> None:
    assert why in why_not(allocated(result(text=text)), dra={"replicas": 4}).reason.sentence


@pytest.mark.parametrize(
    ("on", "device", "why", "of"),
    [
        (node(), "gpu-99", "gpu-99: this node has no such device, it has gpu-7, gpu-6, gpu-5, gpu-4: delete", ""),
        (node([]), "gpu-7", "it has none: delete", ""),
        (node([], fault="the driver does not answer"), "gpu-7", "are not known: the driver does not answer.", ""),
        (node([gpu(0, unavailable="lost")]), "gpu-7", "cannot be granted: lost; the kubelet allocated it", uuid(0)),
        (node([mig_gpu(0)]), "gpu-7", "it is in MIG mode", uuid(0)),
    ],
)
def test_devices_that_cannot_be_had(on: Node, device: str, why: str, of: str) -> None:
    found = why_not(allocated(result(device)), on)
    assert found.uuid == of
    assert why in found.reason.sentence
    assert found.passing is (found.reason.code is Code.NODE_NOT_READY)


def test_only_the_pool_of_claims_is_theirs() -> None:
    policy: dict[str, Any] = {"dra": {"pool": "claims"}, "pool": [{"name": "claims", "device": ["1"]}]}
    assert 'is not in pool "claims"' in why_not(allocated(), **policy).reason.sentence
    assert done(allocated(result("gpu-6")), **policy).holds == {uuid(1): Mode.EXCLUSIVE}


def test_what_others_hold_is_named_and_what_is_being_released_passes() -> None:
    other = container(of="other")
    for held, who in (
        (ledger(entry(0, to=other)), "ml/other"),
        (ledger(others=[foreign(0)]), "ml/plugin (not through nri-gpu)"),
        (holding(Ledger(), prepared_claim(0, name="first")), "claim ml/first"),
    ):
        found = why_not(allocated(), held=held)
        assert f"is held {'exclusively ' * ('plugin' not in who)}by {who}" in found.reason.sentence
        assert found.reason.sentence.startswith("gpu-7: GPU 0 (")
        assert not found.passing
    left = Ledger().with_releasing({uuid(0): Releasing(other.pod.uid, "ml/other", 1.0, 30.0)})
    assert why_not(allocated(), held=left).passing
    assert done(allocated(pods=("other",)), held=left)
    assert not why_not(allocated(), held=left.with_entry(entry(0, to=other))).passing


def test_the_same_claim_again_is_the_same_with_the_pods_of_now() -> None:
    first = done(allocated())
    held = holding(Ledger(), first)
    broken = node([], fault="gone meanwhile")
    again = done(allocated(pods=("train", "other")), broken, held)
    assert again == replace(first, pods=again.pods)
    assert set(again.pods.values()) == {"train", "other"}
    assert "is prepared with gpu-7, and" in why_not(allocated(result("gpu-6")), held=held).reason.sentence


def test_one_gpu_twice_in_one_claim_has_one_mode() -> None:
    twice = allocated(result(share_id="a", text="mode=shared"), result(share_id="b", text="mode=shared"))
    assert done(twice).holds == {uuid(0): Mode.SHARED}
    mixed = allocated(result(text="mode=shared"), result(request="second"))
    assert "in two modes at once" in why_not(mixed).reason.sentence


def test_monitoring_needs_no_free_gpu_and_holds_none() -> None:
    busy = ledger(entry(0, to=container(of="other")))
    found = done(allocated(result(admin=True, text="capabilities=compute")), held=busy)
    assert found.holds == {}
    assert (found.devices[0].admin, found.devices[0].text) == (True, "")
    ill = gpu(0, unavailable="XID 79", health=Health(HealthState.BAD, 1.0, "XID 79"))
    assert done(allocated(result(admin=True)), node([ill])).devices[0].uuid == uuid(0)
    assert "XID 79" in why_not(allocated(), node([ill])).reason.sentence
    assert "MIG mode" in why_not(allocated(result(admin=True)), node([replace(ill, mig_enabled=True)])).reason.sentence


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"namespaces": {"allow": ["other"]}}, 'namespace "ml" may not ask'),
        ({"rule": [{"allow": False, "pod": "train"}]}, "denies it"),
        ({"modes": {"allowed": ["shared"]}}, "mode exclusive may not be asked for"),
        ({"capabilities": {"allowed": ["utility"]}, "defaults": {"capabilities": ["compute"]}}, "compute may not"),
        ({"limits": {"gpus_per_namespace": 1}}, "this claim asks for 1 more (limits.gpus_per_namespace"),
        ({"limits": {"exclusive_gpus_per_namespace": 1}}, "this claim asks for 1 more"),
    ],
)
def test_policy_is_asked_before_anything_is_held(policy: dict[str, Any], why: str) -> None:
    held = holding(Ledger(), prepared_claim(1, name="first", pods=("first",)))
    assert why in why_not(allocated(), held=held, **policy).reason.sentence


@pytest.mark.parametrize(
    "policy",
    [
        {"namespaces": {"allow": ["other"]}, "rule": [{"allow": True, "labels": {"team": "a"}}]},
        {"rule": [{"allow": False, "container": "side"}]},
        {"rule": [{"allow": False, "namespace": "x"}]},
        {"limits": {"gpus_per_container": 1}},
    ],
)
def test_what_only_containers_show_is_left_to_them(policy: dict[str, Any]) -> None:
    assert len(done(allocated(result("gpu-7"), result("gpu-6")), **policy).holds) == 2


def test_one_pod_that_may_is_enough() -> None:
    policy: dict[str, Any] = {"rule": [{"allow": False, "pod": "train"}]}
    assert done(allocated(pods=("train", "other")), **policy)


def test_a_broken_policy_and_a_missing_driver_prepare_nothing() -> None:
    refused = _prepared(allocated(), None, None, Policy.broken("line 3 is no setting"))
    assert isinstance(refused, NotPrepared)
    assert "until the policy is fixed: line 3" in refused.reason.sentence
    assert "driver" in why_not(allocated(), replace(node(), driver=None)).reason.sentence
