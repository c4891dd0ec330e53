"""The ways by which policy lets some new pod have a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu.decision.offered import kubelet_offer, offered_to
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make

Raw = dict[str, Any]
NODE = make.node([make.gpu(0), make.gpu(1), make.mig_gpu(2, ("1g.5gb", "1c.3g.20gb"))]).inventory
ONE: Raw = {"name": "one", "device": ["1"]}
BY_KUBELET: Raw = {"enabled": True, "mig_strategy": "mixed"}


def ways(raw: Raw, inventory: Inventory = NODE) -> dict[str, set[str]]:
    """By place."""
    found = offered_to(inventory, parse_policy(raw, "p.toml"))
    return {unit.place: set(found[unit.uuid]) for unit in inventory.units}


# What GPU 1 of the pool is offered to.
OF_POOL: dict[str, tuple[Raw, set[str]]] = {
    "of none": ({}, set()),
    "of a namespace": ({"pool": [{**ONE, "namespaces": ["ml"]}]}, {"annotation"}),
    "of a namespace, and nobody may ask": (
        {"pool": [{**ONE, "namespaces": ["ml"]}], "namespaces": {"allow": []}},
        set(),
    ),
    "of a rule": ({"rule": [{"namespace": "ml", "allow": True, "pool": "one"}]}, {"annotation"}),
    "of a rule that denies": ({"rule": [{"namespace": "ml", "allow": False}]}, set()),
    "the kubelet's": ({"kubelet": {"enabled": True, "pool": "one"}}, {"kubelet"}),
    "the kubelet's, which is off": ({"kubelet": {"pool": "one"}}, set()),
    "where the kubelet has all": ({"kubelet": {"enabled": True}}, {"kubelet"}),
    "of a resource of its own": ({"kubelet": {"enabled": True, "resources": {"a.io/one": "one"}}}, {"kubelet"}),
    "that of no resource": (
        {
            "pool": [ONE, {"name": "two", "device": ["0"]}],
            "kubelet": {"enabled": True, "resources": {"nvidia.com/gpu": "two"}},
        },
        set(),
    ),
    "that of claims": ({"dra": {"enabled": True, "pool": "one"}}, {"dra"}),
    "that of claims, which are off": ({"dra": {"pool": "one"}}, set()),
}


@pytest.mark.parametrize(("raw", "offered"), OF_POOL.values(), ids=OF_POOL)
def test_a_pool_is_kept_from_all_whom_nothing_names(raw: Raw, offered: set[str]) -> None:
    assert ways({"pool": [ONE], **raw})["1"] == offered


# What GPU 0, which is in no pool, is offered to.
OF_NO_POOL: dict[str, tuple[Raw, set[str]]] = {
    "by default": ({}, {"annotation"}),
    "where nobody may ask": ({"namespaces": {"allow": []}}, set()),
    "where everybody is denied": ({"namespaces": {"deny": ["*"]}}, set()),
    "where a rule allows": (
        {"namespaces": {"allow": []}, "rule": [{"namespace": "ml", "allow": True}]},
        {"annotation"},
    ),
    "where a rule allows other GPUs": (
        {"namespaces": {"allow": []}, "rule": [{"namespace": "ml", "allow": True, "pool": "one"}]},
        set(),
    ),
    "the kubelet has another pool": ({"kubelet": {"enabled": True, "pool": "one"}}, {"annotation"}),
}


@pytest.mark.parametrize(("raw", "offered"), OF_NO_POOL.values(), ids=OF_NO_POOL)
def test_what_is_in_no_pool(raw: Raw, offered: set[str]) -> None:
    assert ways({"pool": [ONE], **raw})["0"] == offered


def test_of_a_divided_gpu_kubelet_and_claims_are_offered_whole_mig_devices() -> None:
    for raw in ({"kubelet": BY_KUBELET}, {"dra": {"enabled": True}}):
        (way,) = raw
        found = ways({"namespaces": {"allow": []}, **raw})
        assert found == {"0": {way}, "1": {way}, "2": set(), "2:0": {way}, "2:1": set()}


# --- resources of pools -----------------------------------------------------------------------------------------------

L40S, A100 = "nvidia.com/l40s", "nvidia.com/gpu"
KINDS: Raw = {"pool": [{"name": "l40s", "model": "*L40S*"}], "kubelet": {"resources": {L40S: "l40s"}}}
TWO_KINDS = (make.gpu(0, model="NVIDIA L40S"), make.gpu(1), make.gpu(2, model="NVIDIA L40S"), make.gpu(3))
DIVIDED = (make.mig_gpu(0, ("1g.5gb",), model="NVIDIA L40S"), make.mig_gpu(1, ("1g.5gb", "2g.10gb")), make.gpu(2))
ONE_DIVIDED = (*TWO_KINDS[:1], *DIVIDED[1:])
SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"
# What each resource has, by place; settings beside the table of resources.
OFFERS: dict[str, tuple[Raw, tuple[Gpu, ...], dict[str, str]]] = {
    "a kind each": ({}, TWO_KINDS, {A100: "1 3", L40S: "0 2"}),
    "renamed": (
        {"replicas": 2, "rename": True},
        TWO_KINDS,
        {f"{A100}.shared": "1 3", f"{L40S}.shared": "0 2"},
    ),
    "nothing of one kind": ({}, TWO_KINDS[1:2], {A100: "1", L40S: ""}),
    "a pool for the first, and the rest to nobody": ({"resources": {A100: "l40s"}}, TWO_KINDS, {A100: "0 2"}),
    "single, one kind divided": (
        {"mig_strategy": "single"},
        (make.gpu(0, model="NVIDIA L40S"), make.mig_gpu(1, ("1g.5gb", "1g.5gb"))),
        {A100: "1:0 1:1", L40S: "0"},
    ),
    "single, one kind divided differently": ({"mig_strategy": "single"}, DIVIDED[:2], {A100: "", L40S: "0:0"}),
    "mixed, one kind divided": (
        {"mig_strategy": "mixed"},
        ONE_DIVIDED,
        {A100: "2", SMALL: "1:0", LARGE: "1:1", L40S: "0"},
    ),
    "mixed, the other kind divided": ({"mig_strategy": "mixed"}, DIVIDED[::2], {A100: "2", L40S: "", SMALL: "0:0"}),
    "mixed, of two prefixes": (
        {"mig_strategy": "mixed", "resources": {"b.io/l40s": "l40s"}},
        DIVIDED,
        {A100: "2", SMALL: "1:0", LARGE: "1:1", "b.io/l40s": "", "b.io/mig-1g.5gb": "0:0"},
    ),
}


@pytest.mark.parametrize(("settings", "gpus", "resources"), OFFERS.values(), ids=OFFERS)
def test_each_kind_has_a_resource(settings: Raw, gpus: tuple[Gpu, ...], resources: dict[str, str]) -> None:
    policy = parse_policy({**KINDS, "kubelet": {**KINDS["kubelet"], **settings}}, "p.toml")
    offer = kubelet_offer(make.inventory(gpus), policy.kubelet, policy.pool)
    assert {name: " ".join(unit.place for unit in units) for name, units in offer.resources.items()} == resources
    assert (offer.left_out, offer.fault) == ({}, "")


def test_of_two_pools_in_mig_mode_the_second_has_no_resource_for_its_mig_devices() -> None:
    policy = parse_policy({**KINDS, "kubelet": {**KINDS["kubelet"], "mig_strategy": "mixed"}}, "p.toml")
    offer = kubelet_offer(make.inventory(DIVIDED), policy.kubelet, policy.pool)
    assert {name: len(units) for name, units in offer.resources.items()} == {A100: 1, SMALL: 1, LARGE: 1, L40S: 0}
    assert "1 MIG device of nvidia.com/l40s: a MIG profile's resource has no pool in its name" in offer.fault
