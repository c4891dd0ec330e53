"""What is recorded reads back as it was, whatever it holds, and equal values give equal text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.allocation import (
    Allocated,
    AllocatedDevice,
    AllocationInvalid,
    AllocationPending,
    KubeletAllocation,
)
from nri_gpu.domain.container import Container
from nri_gpu.domain.gpu import MigEngines
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.domain.value import canonical, decode, encode
from nri_gpu.ledger.holders import ExternalAllocation
from nri_gpu.ledger.ledger import Entry, Lapse
from nri_gpu.records.audit_records import container_json, container_of
from tests.property import strategies
from tests.support import builders as make


@given(strategies.nodes)
def test_a_node(node: Node) -> None:
    text = canonical(node)
    back = decode(Node, json.loads(text))
    assert back == node
    assert canonical(back) == text


@given(strategies.facts(), st.dictionaries(st.sampled_from(["nvidia", "nvidia_uvm"]), st.just("580.95.05")))
def test_how_gpus_are_set_up(facts: dict[str, Any], modules: dict[str, str]) -> None:
    inventory = make.inventory((make.gpu(0, **facts),), modules=modules)
    back = decode(Inventory, json.loads(canonical(inventory)))
    assert back == inventory
    assert canonical(back) == canonical(inventory)  # with what says nothing about what it is


def test_what_0_1_0_wrote_as_zero_is_unknown_and_a_zero_of_today_stays() -> None:
    cut = make.mig_gpu(0, memory_bytes=None, arch=None)
    dark = replace(cut, mig=(replace(cut.mig[0], memory_bytes=None), replace(cut.mig[1], engines=MigEngines(14, 0))))
    recorded = encode(make.inventory((dark,)))
    assert decode(Inventory, recorded).gpus == (dark,)
    gpu: Any = recorded["gpus"][0]  # type: ignore[index] # JSON
    assert gpu["mig"][1]["engines"] == {"multiprocessors": 14, "copy_engines": 0}
    gpu |= {"memory_bytes": 0, "arch": [0, 0]}
    gpu["mig"][0]["memory_bytes"] = 0
    assert decode(Inventory, recorded).gpus == (dark,)


ALLOCATIONS = (
    None,
    Allocated(),
    Allocated((AllocatedDevice("nvidia.com/gpu", "GPU-1"),), shared=True),
    AllocationPending("not yet", "NVIDIA_VISIBLE_DEVICES"),
    AllocationInvalid("forged"),
)


@given(strategies.containers(), st.sampled_from(ALLOCATIONS))
def test_a_container(container: Container, kubelet: KubeletAllocation | None) -> None:
    container = replace(container, kubelet=kubelet)
    recorded = json.loads(json.dumps(container_json(container)))
    back = container_of(recorded)
    assert back == container
    assert container_json(back) == recorded


def test_a_pending_allocation_is_recorded_as_a_fault_that_waits() -> None:
    """As by versions before the union."""
    pending = make.container(kubelet=AllocationPending("not yet", "NVIDIA_VISIBLE_DEVICES"))
    assert container_json(pending)["kubelet"] == {"fault": "not yet", "key": "NVIDIA_VISIBLE_DEVICES", "waits": True}
    invalid = make.container(kubelet=AllocationInvalid("forged"))
    assert container_json(invalid)["kubelet"] == {"fault": "forged"}


@given(strategies.entries())
def test_a_grant(entry: Entry) -> None:
    back = decode(Entry, json.loads(canonical(entry)))
    assert (back, back.since, back.grant.pod_name) == (entry, entry.since, entry.grant.pod_name)


@given(strategies.externals)
def test_an_external_allocation(external: ExternalAllocation) -> None:
    assert decode(ExternalAllocation, json.loads(canonical(external))) == external


@pytest.mark.parametrize("until", [*Lapse, 3.5])
def test_when_a_grant_lapses(until: Lapse | float) -> None:
    entry = replace(make.entry(0), until=until)
    assert decode(Entry, json.loads(canonical(entry))).until == until
    assert encode(replace(entry, until=Lapse.NEVER))["until"] == "inf"


def test_the_order_of_a_set_and_of_a_mapping_is_nothing() -> None:
    one, two = ({"b": "1", "a": "2"}, {"a": "2", "b": "1"})
    assert canonical(make.container(env=one)) == canonical(make.container(env=two))


@pytest.mark.parametrize("trees", [[1], [[["compute"]]], [[[["compute"]], {}]], "none"])
def test_a_driver_whose_trees_are_none(trees: object) -> None:
    with pytest.raises(ValueError, match=r"driver\.trees"):
        decode(
            Node, encode(make.node()) | {"driver": {"version": "1", "generation": "1", "missing": {}, "trees": trees}}
        )


def test_what_cannot_be_read_back_is_not_written() -> None:
    with pytest.raises(TypeError):
        encode(object())
