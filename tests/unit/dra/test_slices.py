"""From offers to ResourceSlices, and to the writes that lead there."""

from __future__ import annotations

import re
from typing import Final

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.dra.questions import Attribute, Capacity, NodeView, Version
from nri_gpu.dra.slices import (
    ALL_GATES,
    AWAY,
    DEVICES_MAX,
    Gate,
    ResourceSlice,
    SliceMetadata,
    SliceSpec,
    Writes,
    gates_of,
    gates_wanted,
    kept_as_sent,
    plan_writes,
    quantity,
    slice_specs,
    specimen,
    without_daemon,
)
from tests.support.api_server import canonical
from tests.unit.dra.offers import BAD, GIB, device, view

NODE: Final = "node1"


def as_json(found: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(found))


def only(specs: dict[str, SliceSpec]) -> SliceSpec:
    (spec,) = specs.values()
    return spec


def applied(writes: Writes, current: dict[str, ResourceSlice]) -> dict[str, ResourceSlice]:
    """What is on the server after it."""
    gone = {each.metadata.name for each in writes.delete}
    kept = {name: each for name, each in current.items() if name not in gone}
    return kept | {each.metadata.name: each for each in (*writes.update, *writes.create)}


def published(offer: NodeView, current: dict[str, ResourceSlice] | None = None) -> dict[str, ResourceSlice]:
    current = current or {}
    return applied(plan_writes(slice_specs(offer, NODE, ALL_GATES), current.values()), current)


def test_a_device_has_the_json_of_kubernetes() -> None:
    attributes: dict[str, Attribute] = {
        "uuid": "GPU-1", "numaNode": 0, "ecc": False, "driverVersion": Version("580.95.5")
    }  # fmt: skip
    offered = device("gpu-0", BAD, attributes=attributes, counter_set="gpu-0-counter-set", counters={"slices": 7})
    spec = only(slice_specs(view(offered), NODE, ALL_GATES))
    assert as_json(spec) == {
        "driver": "gpu.nri.io",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 0, "resourceSliceCount": 1},
        "devices": [
            {
                "name": "gpu-0",
                "attributes": {
                    "uuid": {"string": "GPU-1"},
                    "numaNode": {"int": 0},
                    "ecc": {"bool": False},
                    "driverVersion": {"version": "580.95.5"},
                },
                "capacity": {"memory": {"value": "80Gi"}},
                "consumesCounters": [{"counterSet": "gpu-0-counter-set", "counters": {"slices": {"value": "7"}}}],
                "taints": [{"key": "gpu.nri.io/unhealthy", "value": "bad", "effect": "NoSchedule"}],
            }
        ],
    }


def test_a_shared_device_gives_each_claim_a_share_or_more() -> None:
    offered = device(shared=True, capacity={"memory": Capacity(80 * GIB, 20 * GIB), "shares": Capacity(4, 1)})
    (found,) = only(slice_specs(view(offered), NODE, ALL_GATES)).devices
    assert found.allow_multiple_allocations
    assert as_json(found.capacity) == {
        "memory": {"value": "80Gi", "requestPolicy": {"default": "20Gi", "validRange": {"min": "20Gi", "max": "80Gi"}}},
        "shares": {"value": "4", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "4"}}},
    }
    (alone,) = only(slice_specs(view(offered), NODE, ALL_GATES - {Gate.SHARED})).devices
    assert as_json(alone.capacity) == {"memory": {"value": "80Gi"}}


def test_without_gates_their_fields_are_not_used_and_bad_devices_left_out() -> None:
    offer = view(
        device("gpu-0", BAD),
        device("gpu-1", shared=True),
        device("gpu-2", counter_set="set", counters={"slices": 1}),
        counter_sets={"set": {"slices": 7}},
    )
    assert gates_wanted(offer, NODE) == ALL_GATES
    spec = only(slice_specs(offer, NODE, ()))
    assert [each.name for each in spec.devices] == ["gpu-1", "gpu-2"]
    assert gates_of(spec) == frozenset()
    assert "requestPolicy" not in str(as_json(spec))
    for gate in Gate:
        used = [gates_of(each) for each in slice_specs(offer, NODE, {gate}).values()]
        assert frozenset().union(*used) == {gate}
    assert gates_wanted(view(device()), NODE) == {Gate.TAINTS}  # for the day on which it is needed


def test_the_order_of_devices_is_that_of_slices_and_their_limit_holds() -> None:
    offered = [device(f"gpu-{n}", counter_set=f"set-{n // 7}", counters={"slices": 1}) for n in range(140)]
    sets = {f"set-{n}": {"slices": 7} for n in range(20)}
    specs = slice_specs(view(*offered, counter_sets=sets), NODE, ALL_GATES)
    in_order = [specs[name] for name in sorted(specs)]
    assert [each.name for spec in in_order for each in spec.devices] == [each.name for each in offered]
    assert [each.name for spec in in_order for each in spec.shared_counters] == list(sets)
    assert all(len(spec.devices) <= DEVICES_MAX and len(spec.shared_counters) <= 8 for spec in in_order)
    assert not any(spec.devices and spec.shared_counters for spec in in_order)
    assert {spec.pool.resource_slice_count for spec in in_order} == {len(specs)} == {6}


def test_a_device_keeps_to_the_limit_of_its_properties() -> None:
    attributes: dict[str, Attribute] = {f"a{n}": n for n in range(40)}
    (found,) = only(slice_specs(view(device(attributes=attributes)), NODE, ALL_GATES)).devices
    assert list(found.attributes) == [f"a{n}" for n in range(31)]


@pytest.mark.parametrize("node", ["n", "a.b-c", "x" * 253, ".".join(["y" * 62] * 4)])
def test_a_slices_name_is_one_of_kubernetes_and_of_this_node_alone(node: str) -> None:
    driver = "gpu." + "d" * 56 + ".io"
    (name,) = slice_specs(view(device(), driver=driver), node, ALL_GATES)
    assert len(name) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)
    assert name not in slice_specs(view(device(), driver=driver), node[:-1] + "z", ALL_GATES)
    assert name == next(iter(slice_specs(view(device("other"), driver=driver), node, ALL_GATES)))


def test_one_update_keeps_the_generation_and_more_raise_it_for_all() -> None:
    many = [device(f"gpu-{n}") for n in range(DEVICES_MAX + 1)]
    there = published(view(*many))
    one = plan_writes(slice_specs(view(device("gpu-0", BAD), *many[1:]), NODE, ALL_GATES), there.values())
    assert ([each.spec.pool.generation for each in one.update], one.create, one.delete) == ([1], (), ())
    both = [device("gpu-0", BAD), *many[1:-1], device("gpu-64", BAD)]
    writes = plan_writes(slice_specs(view(*both), NODE, ALL_GATES), there.values())
    assert [each.spec.pool.generation for each in writes.update] == [2, 2]
    again = plan_writes(slice_specs(view(*many), NODE, ALL_GATES), [there[min(there)]])  # of what is gone
    assert [each.spec.pool.generation for each in (*again.update, *again.create)] == [2, 2]


def test_a_taint_that_stays_keeps_its_time() -> None:
    sent = next(iter(published(view(device("gpu-0", BAD)))))
    offer = view(device("gpu-0", BAD))
    there = published(offer)
    (old,) = there[sent].spec.devices
    dated = replace(old, taints=(replace(old.taints[0], time_added="2026-11-22T12:00:00Z"),))
    there[sent] = replace(there[sent], spec=replace(there[sent].spec, devices=(dated,)))
    assert not plan_writes(slice_specs(offer, NODE, ALL_GATES), there.values())
    again = published(view(device("gpu-0", BAD, AWAY), device("gpu-1", BAD)), there)
    times = [[taint.time_added for taint in each.taints] for each in again[sent].spec.devices]
    assert times == [["2026-11-22T12:00:00Z", None], [None]]
    worse = published(view(device("gpu-0", replace(BAD, effect="NoExecute"))), there)
    assert worse[sent].spec.devices[0].taints[0].time_added is None


def test_a_server_that_spells_it_otherwise_is_not_written_to_again() -> None:
    offer = view(device("gpu-0", BAD))
    wanted = slice_specs(offer, NODE, ALL_GATES)
    (sent,) = plan_writes(wanted, ()).create
    (old,) = sent.spec.devices
    odd = replace(old, attributes={"type": {"string": "GPU"}}, taints=(replace(old.taints[0], time_added="now"),))
    answer = ResourceSlice(SliceMetadata("x", "uid", "7"), replace(sent.spec, devices=(odd,)))
    kept = kept_as_sent(sent, answer)
    assert kept.metadata == answer.metadata
    assert kept.spec.devices[0].taints[0].time_added == "now"
    named = replace(kept, metadata=replace(kept.metadata, name=sent.metadata.name))
    assert not plan_writes(wanted, [named])


def test_a_specimen_uses_the_gates_that_it_is_made_for() -> None:
    for gates in (ALL_GATES, *(frozenset({gate}) for gate in Gate)):
        found = specimen("gpu.nri.io", NODE, gates)
        assert gates_of(found.spec) == gates
        assert found.metadata.name not in slice_specs(view(device()), NODE, gates)


def test_without_the_daemon_every_device_keeps_claims_away() -> None:
    offer = without_daemon(view(device(), device("gpu-1", BAD)))
    assert [each.taints for each in offer.devices] == [(AWAY,), (BAD, AWAY)]


@example(1023)
@example(1024)
@example(1_500_000)
@given(
    st.integers(0, 1 << 60) | st.integers(0, 1 << 20).map(lambda n: n * 1000) | st.integers(0, 1 << 20).map(GIB.__mul__)
)
def test_a_quantity_is_spelled_as_kubernetes_does(amount: int) -> None:
    assert canonical(quantity(amount)) == quantity(amount)
    number, unit = re.fullmatch(r"(\d+)(.*)", quantity(amount)).groups()  # type: ignore[union-attr]
    units = {"": 1} | {f"{u}i": 1024 ** (n + 1) for n, u in enumerate("KMGTPE")}
    units |= {u: 1000 ** (n + 1) for n, u in enumerate("kMGTPE")}
    assert int(number) * units[unit] == amount
