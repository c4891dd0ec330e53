"""What is recorded reads back as it was, whatever it holds, and equal values give equal text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.allocation.ledger import Entry, ExternalAllocation
from nri_gpu.domain.codec import CodecError, canonical, decode, encode
from nri_gpu.domain.container import Container
from nri_gpu.domain.node import Inventory, Node
from tests.property import worlds
from tests.support import builders as make


@given(worlds.nodes)
def test_a_node(node: Node) -> None:
    text = canonical(node)
    back = decode(Node, json.loads(text))
    assert back == node
    assert canonical(back) == text


@given(worlds.facts(), st.dictionaries(st.sampled_from(["nvidia", "nvidia_uvm"]), st.just("580.95.05")))
def test_how_gpus_are_set_up(facts: dict[str, Any], modules: dict[str, str]) -> None:
    inventory = make.inventory((make.gpu(0, **facts),), modules=modules)
    back = decode(Inventory, json.loads(canonical(inventory)))
    assert back == inventory
    assert canonical(back) == canonical(inventory)  # with what says nothing about what it is


@given(worlds.containers())
def test_a_container(container: Container) -> None:
    text = canonical(container)
    back = decode(Container, json.loads(text))
    assert back == container
    assert canonical(back) == text


@given(worlds.entries())
def test_a_grant(entry: Entry) -> None:
    back = decode(Entry, json.loads(canonical(entry)))
    assert (back, back.since, back.grant.pod_name) == (entry, entry.since, entry.grant.pod_name)


@given(worlds.foreigners)
def test_a_foreign_holder(foreign: ExternalAllocation) -> None:
    assert decode(ExternalAllocation, json.loads(canonical(foreign))) == foreign


def test_a_time_without_end() -> None:
    entry = make.entry(0, since=float("inf"))
    assert decode(Entry, json.loads(canonical(entry))).since == float("inf")
    assert "Infinity" not in canonical(entry)


def test_the_order_of_a_set_and_of_a_mapping_is_nothing() -> None:
    one, two = ({"b": "1", "a": "2"}, {"a": "2", "b": "1"})
    assert canonical(make.container(env=one)) == canonical(make.container(env=two))


BROKEN = {
    "not an object": ([], "Container is []"),
    "a field too many": ({"id": "x", "colour": "red"}, "a field 'colour'"),
    "a field missing": ({"id": "x"}, "not whole"),
    "a wrong type": ({"id": 7, "name": "", "pod": {}}, "Container.id is 7, where str belongs"),
    "deep inside": (
        encode(make.container()) | {"devices": [{"path": "/dev/x", "major": "one", "minor": 0}]},
        "Container.devices[0].major is",
    ),
    "a string for a list": (encode(make.container()) | {"devices": "none"}, "where a list belongs"),
}


@pytest.mark.parametrize(("found", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_none_is_told_with_its_place(found: object, said: str) -> None:
    with pytest.raises(CodecError) as error:
        decode(Container, found)
    assert said in str(error.value)


def test_what_cannot_be_read_back_is_not_written() -> None:
    with pytest.raises(TypeError):
        encode(object())
