"""Law: what is remembered of a kind of container is what would be found out anew, whoever was asked about before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.decision.decide import KINDS, BrokenPolicy, decide
from nri_gpu.domain.claim import NumaBinding
from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Decision, Inject, Refuse
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.node import Node, NumaNode
from nri_gpu.policy.globs import NOTHING
from nri_gpu.policy.model import ExtraRules, Policy, PrivilegedAction, PrivilegedSettings
from tests.property import worlds
from tests.support import builders as make

NODE = replace(make.node(extras=worlds.OFFERS), compat=(make.package(),))

ANY_EXTRA = ExtraRules(allowed=frozenset(Extra))


def _anew(container: Container, node: Node, ledger: Ledger, policy: Policy | BrokenPolicy) -> Decision:
    KINDS.forget()
    return decide(container, node, ledger, policy)


def _differing(one: Container, other: Container) -> Iterator[Container]:
    """The first, each time with one thing of the second."""
    for each in fields(Container):
        if each.name != "pod":
            yield replace(one, **{each.name: getattr(other, each.name)})
    for each in fields(one.pod):
        yield replace(one, pod=replace(one.pod, **{each.name: getattr(other.pod, each.name)}))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Container, Container]:
    """One that most often can be granted, and one that is like any."""
    one, claim = draw(worlds.containers()), draw(worlds.claims)
    plain = replace(
        one,
        annotations={},
        devices=(),
        cdi_devices=(),
        nvidia_hooks=frozenset(),
        privileged=False,
        env_twice=frozenset(),
    )
    return replace(plain, pod=replace(plain.pod, annotations={make.KEY: claim})), draw(worlds.containers())


@settings(max_examples=300)
@given(_pairs(), st.one_of(st.just(NODE), worlds.nodes), worlds.ledgers, worlds.policies)
def test_one_that_differs_in_anything_gets_what_it_would_get_alone(
    pair: tuple[Container, Container], node: Node, ledger: Ledger, policy: Policy | BrokenPolicy
) -> None:
    one, other = pair
    variants = list(_differing(one, other))
    expected = [_anew(each, node, ledger, policy) for each in variants]
    first = _anew(one, node, ledger, policy)
    event(type(first).__name__)
    assert [decide(each, node, ledger, policy) for each in variants] == expected
    assert decide(one, node, ledger, policy) == first


@settings(max_examples=200)
@given(_pairs(), st.one_of(st.just(NODE), worlds.nodes), worlds.ledgers, worlds.policies)
def test_the_next_of_a_kind_gets_what_it_would_get_alone(
    pair: tuple[Container, Container], node: Node, ledger: Ledger, policy: Policy | BrokenPolicy
) -> None:
    one, _ = pair
    pod = replace(one.pod, id=PodId("other"), uid=PodUid("other"))
    other = replace(one, id=ContainerId("other"), pod=pod)
    after = ledger.after(decide(one, node, ledger, policy), 0.0)
    second = decide(other, node, after, policy)
    event(f"second: {type(second).__name__}")
    assert second == _anew(other, node, after, policy)


@pytest.mark.parametrize(
    "odd",
    [
        {"env_twice": frozenset({"LD_LIBRARY_PATH"})},
        {"rlimits": frozenset({"RLIMIT_MEMLOCK"})},
        {"privileged": True},
        {"pinned": True},
        {"nvidia_hooks": frozenset({"nvidia-ctk"}), "cdi_devices": ("nvidia.com/gpu=0",)},
    ],
)
def test_an_odd_one_is_looked_at(odd: dict[str, Any]) -> None:
    one = make.container("1;extras=rdma", env={"LD_LIBRARY_PATH": "/x"})
    bound = replace(Policy.default().placement, numa=NumaBinding.CPUS)
    policy = replace(
        Policy.default(),
        placement=bound,
        privileged=PrivilegedSettings(action=PrivilegedAction.AUDIT),
        extras=ANY_EXTRA,
    )
    gpus = tuple(replace(gpu, numa_node=0) for gpu in NODE.gpus)
    node = replace(NODE, inventory=replace(NODE.inventory, gpus=gpus, numa=(NumaNode(0, "0-3"),)))
    first = decide(one, node, Ledger(), policy)
    assert isinstance(first, Inject)
    assert decide(replace(one, **odd), node, Ledger(), policy) != first


def test_what_is_remembered_holds_for_one_node_and_one_policy() -> None:
    one, policy = make.container("1"), Policy.default()
    other = replace(policy, namespaces=replace(policy.namespaces, allow=NOTHING))
    assert isinstance(decide(one, NODE, Ledger(), policy), Inject)
    assert isinstance(decide(one, NODE, Ledger(), other), Refuse)
    assert isinstance(decide(one, NODE, Ledger(), policy), Inject)
    assert isinstance(decide(one, replace(NODE, number=2, driver=None), Ledger(), policy), Refuse)
    assert isinstance(decide(one, NODE, Ledger(), BrokenPolicy("gone")), Refuse)
