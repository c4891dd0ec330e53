"""Laws of what a node offers to the scheduler: the API server takes it, and what is free of taints can be prepared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.decision.claim_devices import prepared
from nri_gpu.decision.offered import is_allocatable, kubelet_offer
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid, PreparedClaim
from nri_gpu.dra.offered_devices import CORDONED, HELD, UNHEALTHY, CounterSets, not_ready, offer
from nri_gpu.dra.questions import OfferedDevice, Version
from nri_gpu.ledger.holders import UNUSED
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import PoolList
from tests.property import strategies as some

LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
IDENTIFIER: Final = re.compile(r"(?:[a-z0-9.]{1,63}/)?[A-Za-z_][A-Za-z0-9_]{0,31}")
SEMVER: Final = re.compile(r"(?:0|[1-9]\d*)(?:\.(?:0|[1-9]\d*)){2}")
EFFECTS: Final = {"NoSchedule", "NoExecute"}

replicas = st.sampled_from([1, 1, 4])


def within_limits(devices: Sequence[OfferedDevice], counter_sets: CounterSets) -> None:
    """What the API server demands of devices."""
    assert len({each.name for each in devices}) == len(devices)
    for device in devices:
        assert LABEL.fullmatch(device.name)
        assert len(device.attributes) + len(device.capacity) <= 32
        assert all(IDENTIFIER.fullmatch(each) for each in (*device.attributes, *device.capacity))
        assert all(len(each) <= 64 for each in device.attributes.values() if isinstance(each, str))
        versions = [each.text for each in device.attributes.values() if isinstance(each, Version)]
        assert all(SEMVER.fullmatch(each) for each in versions)
        assert all(VALUE.fullmatch(each.value) and each.effect in EFFECTS for each in device.taints)
        for counter, amount in device.counters.items():
            assert amount <= counter_sets[device.counter_set][counter]


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
        if {each.key for each in device.taints} & {UNHEALTHY, CORDONED, HELD}:
            assert not isinstance(found, PreparedClaim), found
        else:
            assert isinstance(found, PreparedClaim) or found.passing, found


NAMES: Final = ("nvidia.com/gpu", "nvidia.com/b", "b.io/a", "b.io/b")


@given(
    some.nodes, some.rules_and_pools(), st.permutations(NAMES), st.sampled_from(MigStrategy), st.integers(0, len(NAMES))
)
def test_no_two_resources_of_the_kubelet_have_a_name_or_a_gpu_in_common(
    node: Node, tables: tuple[object, PoolList], names: Sequence[str], strategy: MigStrategy, number: int
) -> None:
    _, pools = tables
    inventory = node.inventory
    of_pools = zip(names[:number], (pool.name for pool in pools.pools), strict=False)
    settings = KubeletSettings(enabled=True, mig_strategy=strategy, resources=tuple(of_pools))
    offer = kubelet_offer(inventory, settings, pools)
    offered = [unit.uuid for units in offer.resources.values() for unit in units]
    left_out = [unit.uuid for units in offer.left_out.values() for unit in units]
    assert len({*offered, *left_out}) == len(offered) + len(left_out)
    assert {*settings.names} <= offer.resources.keys()
    assert all(map(settings.is_own, offer.resources))
    owners: dict[str, set[str | None]] = {}
    for name, units in offer.resources.items():
        own = {settings.resource_of(pool.name if (pool := pools.of(unit)) else "") for unit in units}
        prefix, _, rest = name.partition("/")
        owners.setdefault(f"{prefix}/mig-" if rest.startswith("mig-") else name, set()).update(own)
        assert own <= ({*settings.names} if rest.startswith("mig-") else {name})
    assert all(len(each) <= 1 for each in owners.values())
    if strategy is MigStrategy.MIXED:  # and none is forgotten
        has_one = {
            unit.uuid
            for unit in inventory.units
            if is_allocatable(unit) and settings.resource_of(pool.name if (pool := pools.of(unit)) else "")
        }
        assert {*offered, *left_out} == has_one
    assert bool(offer.fault) == bool(left_out)
