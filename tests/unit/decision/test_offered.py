"""The ways by which policy lets some new pod have a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu.decision.offered import Way, offered_to
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make

Raw = dict[str, Any]
NODE = make.node([make.gpu(0), make.gpu(1), make.mig_gpu(2, ("1g.5gb", "1c.3g.20gb"))]).inventory
ONE: Raw = {"name": "one", "device": ["1"]}
ALL = frozenset(Way)
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
