"""What policy lets a container have of a node: pools, limits, sharers; and who may ask how. By whole decisions."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Entry, GrantPhase, Ledger
from nri_gpu.allocation.reservations import cleared_for
from nri_gpu.decision.claim import needs_grant
from nri_gpu.decision.decide import decide
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Decision, Inject, Pass, Refuse
from nri_gpu.domain.node import Node
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import parse_policy
from tests.support import builders as make

Raw = dict[str, Any]
NODE = make.node()
MIXED = make.node([make.gpu(0), make.gpu(1), make.mig_gpu(2, ("1g.5gb", "1g.5gb", "3g.20gb"))])


def policy(**raw: object) -> Policy:
    return parse_policy(raw, "/etc/p.toml")


def played(row: list[Container], using: Policy, node: Node = NODE, ledger: Ledger | None = None) -> list[Decision]:
    """Decide for each in turn, on one ledger."""
    now, decisions = ledger or Ledger(), []
    for container in row:
        cleared = cleared_for(now, container)
        decision = decide(container, node, cleared, using)
        now = cleared.after(decision, 0.0)
        decisions.append(decision)
    return decisions


def gpus(decision: Decision) -> list[str]:
    assert isinstance(decision, Inject), decision
    return list(decision.grant.uuids)


def sentence(decision: Decision, code: Code) -> str:
    assert isinstance(decision, Refuse), decision
    assert decision.reason.code is code
    assert str(decision.reason).endswith(".")
    assert len(str(decision.reason)) < REFUSAL_MAX
    return decision.reason.sentence


def asks(claim: str, pod: str = "a", name: str = "main", namespace: str = "ml", **fields: Any) -> Container:  # noqa: ANN401
    return make.container(of=make.pod(pod, claim, namespace=namespace, **fields), name=name)


LIMITS: dict[str, tuple[Raw, list[Container], str]] = {
    "container": (
        {"gpus_per_container": 1},
        [asks("2")],
        "a container may have at most 1 GPU; this container asks for 2 (limits.gpus_per_container in /etc/p.toml): "
        "ask for fewer, or raise that limit.",
    ),
    "pod": (
        {"gpus_per_pod": 3},
        [asks("2"), asks("2", name="side")],
        'pod "a" may have at most 3 GPUs, of which 2 are held already; this container asks for 2 more '
        "(limits.gpus_per_pod in /etc/p.toml): wait until some are given back, ask for fewer, or raise that limit.",
    ),
    "namespace": (
        {"gpus_per_namespace": 2},
        [asks("2"), asks("1", "b", namespace="x"), asks("1", "c")],
        'namespace "ml" may have at most 2 GPUs, of which 2 are held already; this container asks for 1 more '
        "(limits.gpus_per_namespace",
    ),
    "exclusive ones of a namespace": (
        {"exclusive_gpus_per_namespace": 1},
        [asks("device=0"), asks("device=1;mode=shared", "b"), asks("device=2", "c")],
        'namespace "ml" may have at most 1 GPU in exclusive mode, of which 1 is held already',
    ),
    "node": (
        {"gpus_per_node": 3},
        [asks("2"), asks("1", "b", namespace="x"), asks("1", "c", namespace="y")],
        "all containers of this node together may have at most 3 GPUs, of which 3 are held already",
    ),
    "nothing at all": ({"gpus_per_node": 0}, [asks("1")], "may have at most 0 GPUs; this container asks for 1"),
    "the narrowest first": (
        {"gpus_per_container": 1, "gpus_per_node": 1},
        [asks("2")],
        "limits.gpus_per_container",
    ),
    "sharers of a named GPU": (
        {"containers_per_gpu": 2},
        [asks("device=0;mode=shared", each) for each in "abc"],
        f"GPU 0 ({make.uuid(0)}) is shared by 2 containers already, as many as may (limits.containers_per_gpu in "
        "/etc/p.toml): wait until one ends, ask for another GPU, or raise that limit.",
    ),
    "sharers of all": (
        {"containers_per_gpu": 1},
        [asks("device=3;mode=shared"), asks("all;mode=shared", "b")],
        "GPU 3",
    ),
}


@pytest.mark.parametrize(("limits", "row", "said"), LIMITS.values(), ids=LIMITS)
def test_the_last_of_a_row_is_over_the_limit(limits: Raw, row: list[Container], said: str) -> None:
    *before, last = played(row, policy(limits=limits))
    assert all(isinstance(each, Inject) for each in before)
    assert said in sentence(last, Code.OVER_LIMIT)


WITHIN: dict[str, tuple[Raw, list[Container]]] = {
    "the pod's containers share": ({"gpus_per_pod": 1}, [asks("device=0"), asks("device=0", name="side")]),
    "the namespace shares": (
        {"gpus_per_namespace": 1},
        [asks("device=0;mode=shared", each) for each in "abc"],
    ),
    "another that is less shared is taken": (
        {"containers_per_gpu": 1},
        [asks("1;mode=shared", each) for each in "abcd"],
    ),
    "exclusive ones have no sharers": (
        {"containers_per_gpu": 1},
        [asks("device=0"), asks("device=0", name="side")],
    ),
    "the same asks again": ({"gpus_per_node": 1}, [asks("1"), asks("1")]),
    "its next attempt": (
        {"gpus_per_node": 1},
        [asks("1"), replace(asks("1"), id=ContainerId("second"))],
    ),
    "nothing": ({"gpus_per_node": 0}, [asks("none")]),
}


@pytest.mark.parametrize(("limits", "row"), WITHIN.values(), ids=WITHIN)
def test_all_of_a_row_are_within_the_limit(limits: Raw, row: list[Container]) -> None:
    assert all(isinstance(each, Inject) for each in played(row, policy(limits=limits)))


def test_what_lapsed_counts_no_more() -> None:
    lapsed = make.ledger(make.entry(0, 1, to=asks("2", "old"), phase=GrantPhase.LAPSED))
    assert gpus(played([asks("1")], policy(limits={"gpus_per_namespace": 1}), ledger=lapsed)[0])


def test_where_every_gpu_is_shared_enough_the_refusal_says_so() -> None:
    using = policy(limits={"containers_per_gpu": 1})
    *_, last = played([asks("1;mode=shared", each) for each in "abcde"], using)
    said = sentence(last, Code.NO_SUCH_GPU)
    assert "(not offered here: 4 shared by as many containers as may (limits.containers_per_gpu))." in said


def test_a_rule_s_limit_goes_before_and_is_named() -> None:
    rules = [{"namespace": "ml", "allow": True, "limits": {"gpus_per_pod": 1}}]
    using = policy(rule=rules, limits={"gpus_per_pod": 4})
    assert "(rule[0].limits.gpus_per_pod in" in sentence(played([asks("2")], using)[0], Code.OVER_LIMIT)
    assert len(gpus(played([asks("2", namespace="x")], using)[0])) == 2


POOLS: list[Raw] = [
    {"name": "prod", "device": ["0", "1"], "namespaces": ["prod-*"]},
    {"name": "rest", "model": "*", "memory_at_most": "1Gi", "namespaces": ["x"]},
    {"name": "late", "device": ["1", "2"], "containers_per_gpu": 1, "namespaces": ["late"]},
]


def test_gpus_of_a_pool_are_offered_to_its_namespaces_only() -> None:
    using = policy(pool=POOLS)
    assert gpus(played([asks("1")], using)[0]) == [make.uuid(3)]
    assert gpus(played([asks("all")], using)[0]) == [make.uuid(3)]
    assert gpus(played([asks("all", namespace="prod-a")], using)[0]) == [make.uuid(0), make.uuid(1), make.uuid(3)]
    assert gpus(played([asks("all", namespace="late")], using)[0]) == [make.uuid(2), make.uuid(3)]
    said = sentence(played([asks("device=0")], using)[0], Code.NO_SUCH_GPU)
    assert 'it has GPUs 3 (not offered here: 3 in pool "prod", "late", kept for others).' in said


def test_who_asks_by_annotation_alone_is_sent_to_the_kubelet_where_that_gives_all() -> None:
    kubelets: list[Raw] = [{"name": "cluster", "model": "*"}]
    using = policy(pool=kubelets, kubelet={"enabled": True, "pool": "cluster"})
    for claim in ("1", "all", "device=0"):
        said = sentence(played([asks(claim)], using)[0], Code.NO_SUCH_GPU)
        assert 'in pool "cluster", which only the kubelet gives from: write nvidia.com/gpu' in said
    using = policy(pool=[POOLS[0], *kubelets], kubelet={"enabled": True, "pool": "cluster"})
    assert "kept for others" in sentence(played([asks("1")], using)[0], Code.NO_SUCH_GPU)


def test_a_rule_opens_a_pool_and_keeps_to_it() -> None:
    using = policy(pool=POOLS, rule=[{"namespace": "guest", "allow": True, "pool": "late"}])
    assert gpus(played([asks("all", namespace="guest")], using)[0]) == [make.uuid(2)]
    said = sentence(played([asks("device=3", namespace="guest")], using)[0], Code.NO_SUCH_GPU)
    assert "kept for others" in said


def test_a_pool_has_its_own_number_of_sharers() -> None:
    using = policy(pool=POOLS, limits={"containers_per_gpu": 5})
    row = [asks("device=2;mode=shared", each, namespace="late") for each in "ab"]
    assert "(pool[2].containers_per_gpu in" in sentence(played(row, using)[1], Code.OVER_LIMIT)


def test_mig_devices_are_in_pools_by_profile_and_with_their_gpu() -> None:
    by_profile = policy(pool=[{"name": "small", "mig": ["1g.5gb"], "namespaces": ["x"]}])
    assert isinstance(played([asks("mig=1g.5gb")], by_profile, MIXED)[0], Refuse)
    assert gpus(played([asks("mig=1g.5gb", namespace="x")], by_profile, MIXED)[0]) == [make.mig_uuid(2, 0)]
    assert gpus(played([asks("mig=3g.20gb")], by_profile, MIXED)[0]) == [make.mig_uuid(2, 2)]
    whole = policy(pool=[{"name": "cut", "device": ["2"], "namespaces": ["x"]}])
    assert isinstance(played([asks("mig=3g.20gb")], whole, MIXED)[0], Refuse)
    assert gpus(played([asks("mig=3g.20gb", namespace="x")], whole, MIXED)[0]) == [make.mig_uuid(2, 2)]
    one = policy(pool=[{"name": "cut", "device": ["2:1"], "namespaces": ["x"]}])
    assert gpus(played([asks("mig=1g.5gb:1")], one, MIXED)[0]) == [make.mig_uuid(2, 0)]
    assert isinstance(played([asks("device=2:1")], one, MIXED)[0], Refuse)


def test_a_grant_stays_what_it_was_under_a_stricter_policy() -> None:
    held = make.ledger(make.entry(0, to=asks("device=0")))
    strict = policy(pool=POOLS, limits={"gpus_per_node": 0})
    assert gpus(played([asks("device=0")], strict, ledger=held)[0]) == [make.uuid(0)]


def test_modes_that_may_not_be_asked_for() -> None:
    using = policy(modes={"allowed": ["exclusive"]})
    assert "modes.allowed in /etc/p.toml" in sentence(played([asks("1;mode=shared")], using)[0], Code.NOT_ALLOWED)
    assert gpus(played([asks("1")], using)[0])


ENVIRONMENT = policy(environment={"may_ask": ["ml"]})


def test_where_the_environment_may_ask_it_does() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "1,3,1"}
    container = make.container(env=env)
    assert gpus(decide(container, NODE, Ledger(), ENVIRONMENT)) == [make.uuid(1), make.uuid(3)]
    assert needs_grant(container, ENVIRONMENT) == "NVIDIA_VISIBLE_DEVICES"
    elsewhere = make.container(of=make.pod(namespace="x"), env=env)
    for other, using in ((elsewhere, ENVIRONMENT), (container, policy())):
        assert isinstance(decide(other, NODE, Ledger(), using), Pass)
        assert needs_grant(other, using) == ""


def test_an_annotation_goes_before_the_environment() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "1"}
    assert gpus(decide(make.container("device=2", env=env), NODE, Ledger(), ENVIRONMENT)) == [make.uuid(2)]
    assert gpus(decide(make.container("none", env=env), NODE, Ledger(), ENVIRONMENT)) == []


@pytest.mark.parametrize("value", ["", "void", "none"])
def test_the_environment_can_ask_for_nothing(value: str) -> None:
    container = make.container(env={"NVIDIA_VISIBLE_DEVICES": value})
    assert isinstance(decide(container, NODE, Ledger(), ENVIRONMENT), Pass)


def test_all_in_the_environment_is_most_likely_the_image_s() -> None:
    container = make.container(env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "environment.may_ask_all" in sentence(decide(container, NODE, Ledger(), ENVIRONMENT), Code.NOT_ALLOWED)
    trusting = policy(environment={"may_ask": ["ml"], "may_ask_all": True})
    assert len(gpus(decide(container, NODE, Ledger(), trusting))) == make.GPUS


def test_what_the_environment_cannot_mean_is_refused() -> None:
    container = make.container(env={"NVIDIA_VISIBLE_DEVICES": "0,frob"})
    said = sentence(decide(container, NODE, Ledger(), ENVIRONMENT), Code.BAD_REQUEST)
    assert said.startswith("NVIDIA_VISIBLE_DEVICES at character 3")


def test_rules_cover_requests_of_the_environment() -> None:
    using = policy(environment={"may_ask": ["ml"]}, rule=[{"namespace": "ml", "allow": False}])
    container = make.container(env={"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "rule[0]" in sentence(decide(container, NODE, Ledger(), using), Code.NOT_ALLOWED)


@pytest.mark.parametrize(
    ("action", "granted", "noted"), [("allow", True, False), ("audit", True, True), ("deny", False, True)]
)
def test_privileged_containers(action: str, granted: bool, noted: bool) -> None:
    using = policy(privileged={"action": action})
    decision = decide(make.container("1", privileged=True), NODE, Ledger(), using)
    if granted:
        assert isinstance(decision, Inject)
        assert ("it is privileged" in decision.note) is noted
    else:
        assert "privileged.action" in sentence(decision, Code.NOT_ALLOWED)
    silent = decide(make.container(privileged=True), NODE, Ledger(), using)
    assert isinstance(silent, Pass)
    assert ("it is privileged" in silent.note) is noted
    opted_out = decide(make.container("none", privileged=True), NODE, Ledger(), using)
    assert isinstance(opted_out, Inject)
    assert ("it is privileged" in opted_out.note) is noted
    ordinary = decide(make.container("1"), NODE, Ledger(), using)
    assert isinstance(ordinary, Inject)
    assert ordinary.note == ""


@pytest.mark.parametrize(
    ("stale", "age_s", "served"), [("serve", 301.0, True), ("refuse", 300.0, True), ("refuse", 300.1, False)]
)
def test_a_stale_inventory(stale: str, age_s: float, served: bool) -> None:
    node = replace(NODE, inventory_age_s=age_s)
    using = policy(inventory={"stale": stale})
    decision = decide(make.container("1"), node, Ledger(), using)
    if served:
        assert isinstance(decision, Inject)
    else:
        assert "last answered 300 s ago" in sentence(decision, Code.NODE_NOT_READY)
    assert isinstance(decide(make.container("none"), node, Ledger(), using), Inject)


def test_a_mode_counts_only_where_it_is_held() -> None:
    shared: Entry = make.entry(0, to=asks("x", "s"), mode=Mode.SHARED)
    using = policy(limits={"exclusive_gpus_per_namespace": 1})
    assert gpus(played([asks("1")], using, ledger=make.ledger(shared))[0]) == [make.uuid(1)]
