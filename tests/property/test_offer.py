"""Laws of what a node offers to the scheduler: the API server takes it, and what is free of taints can be prepared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.decision.claim_devices import prepared
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid, PreparedClaim
from nri_gpu.dra.offered_devices import HELD, UNHEALTHY, not_ready, offer
from nri_gpu.ledger.ledger import UNUSED, Ledger
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.model import Policy
from tests.property import strategies as some
from tests.unit.dra.test_offered_devices import within_limits

replicas = st.sampled_from([1, 1, 4])


@given(some.nodes, some.ledgers, some.policies, replicas)
def test_the_api_server_takes_what_any_node_offers(node: Node, ledger: Ledger, policy: Policy, shared: int) -> None:
    word = not_ready(node, policy, connected=True)
    within_limits(*offer(node, ledger, policy, DraSettings(replicas=shared), word))


@given(some.nodes, some.ledgers, replicas)
def test_a_device_can_be_prepared_unless_a_taint_or_a_claim_says_why_not(
    node: Node, ledger: Ledger, shared: int
) -> None:
    policy = replace(Policy.default(), dra=DraSettings(enabled=True, replicas=shared))
    usage = ledger.usage()
    ready = not not_ready(node, policy, connected=True)
    for device in offer(node, ledger, policy, policy.dra)[0]:
        used = usage.get(device.attributes["uuid"], UNUSED)  # type: ignore[call-overload] # a GPU's is a text
        if used.claims or not ready or (used.external and shared > 1):
            continue  # the scheduler knows of claims; nobody knows whether other components share
        result = AllocatedResult(request="gpu", pool="node", device=device.name)
        claim = AllocatedClaim(
            uid=ClaimUid("new"), namespace="ml", name="new", pods={PodUid("new"): "new"}, results=(result,)
        )
        found = prepared(claim, node, ledger, policy)
        if {each.key for each in device.taints} & {UNHEALTHY, HELD}:
            assert not isinstance(found, PreparedClaim), found
        else:
            assert isinstance(found, PreparedClaim) or found.passing, found
