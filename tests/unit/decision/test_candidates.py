"""What policy lets a container have of a node: pools, limits, sharers; and who may ask how. By whole decisions."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.decision.asked import needs_grant
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code, Inject, Pass, Refuse
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make
from tests.unit.decision.deciding import EMPTY, NODE, injected, played, reason_of, refused

Raw = dict[str, Any]
MIXED = make.node([make.gpu(0), make.gpu(1), make.mig_gpu(2, ("1g.5gb", "1g.5gb", "3g.20gb"))])


def policy(**raw: object) -> Policy:
    return parse_policy(raw, "/etc/p.toml")


def gpus(container: Container, using: Policy, node: Node = NODE, ledger: Ledger = EMPTY) -> list[str]:
    return list(injected(container, node, ledger, using).grant.uuids)


def refusal(container: Container, using: Policy, code: Code, node: Node = NODE) -> str:
    reason = refused(container, node, policy=using)
    assert reason.code is code
    return reason.sentence


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
        "(limits.gpus_per_pod in /etc/p.toml): wait until some are free, ask for fewer, or raise that limit.",
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
        f"GPU 0 ({make.uuid(0)}) is shared by 2 containers already, the most allowed (limits.containers_per_gpu in "
        "/etc/p.toml): wait until one ends, ask for another GPU, or raise that limit.",
    ),
}


@pytest.mark.parametrize(("limits", "row", "said"), LIMITS.values(), ids=LIMITS)
def test_the_last_of_a_row_is_over_the_limit(limits: Raw, row: list[Container], said: str) -> None:
    *before, last = played(row, policy(limits=limits))
    assert all(isinstance(each, Inject) for each in before)
    assert said in reason_of(last, Code.OVER_LIMIT).sentence


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


def test_where_every_gpu_is_shared_enough_the_refusal_says_so() -> None:
    using = policy(limits={"containers_per_gpu": 1})
    *_, last = played([asks("1;mode=shared", each) for each in "abcde"], using)
    said = reason_of(last, Code.NO_SUCH_GPU).sentence
    assert "(not offered here: 4 shared by the most containers allowed (limits.containers_per_gpu))." in said


def test_a_rule_s_limit_goes_before_and_is_named() -> None:
    rules = [{"namespace": "ml", "allow": True, "limits": {"gpus_per_pod": 1}}]
    using = policy(rule=rules, limits={"gpus_per_pod": 4})
    assert "(rule[0].limits.gpus_per_pod in" in refusal(asks("2"), using, Code.OVER_LIMIT)
    assert len(gpus(asks("2", namespace="x"), using)) == 2


POOLS: list[Raw] = [
    {"name": "prod", "device": ["0", "1"], "namespaces": ["prod-*"]},
    {"name": "rest", "model": "*", "memory_at_most": "1Gi", "namespaces": ["x"]},
    {"name": "late", "device": ["1", "2"], "containers_per_gpu": 1, "namespaces": ["late"]},
]
TO_LATE: list[Raw] = [{"namespace": "guest", "allow": True, "pool": "late"}]
CLUSTER: list[Raw] = [{"name": "cluster", "model": "*"}]
KUBELETS: Raw = {"pool": CLUSTER, "kubelet": {"enabled": True, "pool": "cluster"}}
TO_KUBELET = 'in pool "cluster", which only the kubelet allocates from: write nvidia.com/gpu'
BY_MPS = "the kubelet allocates from, and never in mode=mps: have the policy put GPUs for annotations into a [[pool]]"
CLAIMS: Raw = {"pool": CLUSTER, "dra": {"enabled": True, "pool": "cluster"}}
TO_CLAIMS = 'in pool "cluster", which only ResourceClaims get: give the pod a claim with a DeviceClass of gpu.nri.io'
BY_PROFILE: Raw = {"pool": [{"name": "small", "mig": ["1g.5gb"], "namespaces": ["x"]}]}
BY_GPU: Raw = {"pool": [{"name": "cut", "device": ["2"], "namespaces": ["x"]}]}
ONE_PART: Raw = {"pool": [{"name": "cut", "device": ["2:1"], "namespaces": ["x"]}]}
# The claim, its namespace, and what it gets: GPUs by index, MIG devices by both, or the words of a refusal.
POOLED: dict[str, tuple[Raw, Node, str, str, str]] = {
    "a number, outside of all pools": ({"pool": POOLS}, NODE, "1", "ml", "3"),
    "all, outside of all pools": ({"pool": POOLS}, NODE, "all", "ml", "3"),
    "all, of the first pool": ({"pool": POOLS}, NODE, "all", "prod-a", "0 1 3"),
    "all, of a later pool, which has what the first left": ({"pool": POOLS}, NODE, "all", "late", "2 3"),
    "by a selector, outside of all pools": (
        {"pool": POOLS},
        NODE,
        "1;model=*",
        "ml",
        "3",
    ),
    "a rule opens a pool": ({"pool": POOLS, "rule": TO_LATE}, NODE, "all", "guest", "2"),
    "and keeps to it": ({"pool": POOLS, "rule": TO_LATE}, NODE, "4", "guest", "kept for others"),
    "where only the kubelet allocates": (KUBELETS, NODE, "1", "ml", TO_KUBELET),
    "a GPU where only the kubelet allocates": (KUBELETS, NODE, "device=0", "ml", TO_KUBELET),
    "by MPS, where only the kubelet allocates": (
        {**KUBELETS, "mps": {"enabled": True}},
        NODE,
        "1;mode=mps",
        "ml",
        BY_MPS,
    ),
    "where only the kubelet allocates, by two resources": (
        {
            "pool": [{"name": "l40s", "device": ["0"]}, *CLUSTER],
            "kubelet": {"enabled": True, "resources": {"a.io/l40s": "l40s", "nvidia.com/gpu": "cluster"}},
        },
        NODE,
        "1",
        "ml",
        'in pool "l40s", "cluster", which only the kubelet allocates from: write a.io/l40s or nvidia.com/gpu into',
    ),
    "where only claims give": (CLAIMS, NODE, "1", "ml", TO_CLAIMS),
    "beside the kubelet's": ({**KUBELETS, "pool": [POOLS[0], *CLUSTER]}, NODE, "1", "ml", "kept for others"),
    "a MIG profile of others": (BY_PROFILE, MIXED, "mig=1g.5gb", "ml", "kept for others"),
    "a MIG profile of one's own": (BY_PROFILE, MIXED, "mig=1g.5gb", "x", "2:0"),
    "another profile of the same GPU": (BY_PROFILE, MIXED, "mig=3g.20gb", "ml", "2:2"),
    "with a GPU go its MIG devices": (BY_GPU, MIXED, "mig=3g.20gb", "ml", "kept for others"),
    "to whom the GPU is open": (BY_GPU, MIXED, "mig=3g.20gb", "x", "2:2"),
}


@pytest.mark.parametrize(("raw", "node", "claim", "namespace", "expected"), POOLED.values(), ids=POOLED)
def test_pools(raw: Raw, node: Node, claim: str, namespace: str, expected: str) -> None:
    using, container = policy(**raw), asks(claim, namespace=namespace)
    if " " in expected and not expected[0].isdigit():
        assert expected in refusal(container, using, Code.NO_SUCH_GPU, node)
    else:
        uuids = [
            make.mig_uuid(*map(int, at.split(":"))) if ":" in at else make.uuid(int(at)) for at in expected.split()
        ]
        assert gpus(container, using, node) == uuids


# What is named, its namespace, and what it is.
CLOSED: dict[str, tuple[Raw, Node, str, str, str]] = {
    "a GPU of others' pool": ({"pool": POOLS}, NODE, "device=0", "ml", f'GPU 0 ({make.uuid(0)}) is in pool "prod", '),
    "after one that is open": (
        {"pool": POOLS},
        NODE,
        "device=3,2",
        "ml",
        f'GPU 2 ({make.uuid(2)}) is in pool "late", ',
    ),
    "by its UUID": (
        {"pool": POOLS},
        NODE,
        f"device={make.uuid(1)}",
        "x",
        'is in pool "prod", which is kept for others',
    ),
    "a MIG device of others": (ONE_PART, MIXED, "device=2:1", "ml", "MIG device 2:1 (MIG-"),
    "of no pool, where a rule names one": (
        {"pool": POOLS, "rule": TO_LATE},
        NODE,
        "device=3",
        "guest",
        "is in no pool, and the policy's rule names one",
    ),
}


@pytest.mark.parametrize(("raw", "node", "claim", "namespace", "said"), CLOSED.values(), ids=CLOSED)
def test_a_named_gpu_that_is_kept_for_others_is_not_said_to_be_missing(
    raw: Raw, node: Node, claim: str, namespace: str, said: str
) -> None:
    refused_with = refusal(asks(claim, namespace=namespace), policy(**raw), Code.NOT_ALLOWED, node)
    assert said in refused_with
    assert "open it to this pod's namespace" in refused_with
    assert not any(each in refused_with for each in ("this node has no", "prod-*"))  # nor for whom


def test_a_named_gpu_of_the_kubelets_is_asked_for_by_its_resource() -> None:
    kubelet = {"enabled": True, "resources": {"a.io/big": "prod"}, "replicas": 2, "rename": True}
    said = refusal(asks("device=0"), policy(pool=POOLS, kubelet=kubelet), Code.NOT_ALLOWED)
    assert said.endswith("write a.io/big.shared into the container's resources.limits and name no GPU.")


def test_a_gpu_that_is_not_there_is_not_one_that_is_kept() -> None:
    said = refusal(asks("device=9"), policy(pool=POOLS), Code.NO_SUCH_GPU)
    assert "this node has no GPU '9'; it has GPUs 3 (not offered here: 3 in pool" in said


def test_a_pool_has_its_own_number_of_sharers() -> None:
    row = [asks("device=2;mode=shared", each, namespace="late") for each in "ab"]
    _, second = played(row, policy(pool=POOLS, limits={"containers_per_gpu": 5}))
    assert "(pool[2].containers_per_gpu in" in reason_of(second, Code.OVER_LIMIT).sentence


def test_a_grant_stays_what_it_was_under_a_stricter_policy() -> None:
    held = make.ledger(make.entry(0, to=asks("device=0")))
    strict = policy(pool=POOLS, limits={"gpus_per_node": 0})
    assert gpus(asks("device=0"), strict, ledger=held) == [make.uuid(0)]


def test_modes_that_may_not_be_asked_for() -> None:
    using = policy(modes={"allowed": ["exclusive"]})
    assert "modes.allowed in /etc/p.toml" in refusal(asks("1;mode=shared"), using, Code.NOT_ALLOWED)
    assert gpus(asks("1"), using)


ENVIRONMENT = policy(environment={"may_ask": ["ml"]})


def test_where_the_environment_may_ask_it_does() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "1,3,1"}
    container = make.container(env=env)
    assert gpus(container, ENVIRONMENT) == [make.uuid(1), make.uuid(3)]
    assert needs_grant(container, ENVIRONMENT) == "NVIDIA_VISIBLE_DEVICES"
    elsewhere = make.container(of=make.pod(namespace="x"), env=env)
    for other, using in ((elsewhere, ENVIRONMENT), (container, policy())):
        assert isinstance(decide(other, NODE, Ledger(), using), Pass)
        assert needs_grant(other, using) == ""
    for claim, granted in (("device=2", [make.uuid(2)]), ("none", [])):  # an annotation goes before it
        assert gpus(make.container(claim, env=env), ENVIRONMENT) == granted


NAMING: dict[str, tuple[str, Raw, Code, str]] = {
    "all, which is most likely the image's": ("all", {}, Code.NOT_ALLOWED, "environment.may_ask_all"),
    "what it cannot mean": ("0,frob", {}, Code.BAD_REQUEST, "NVIDIA_VISIBLE_DEVICES at character 3"),
    "a rule covers it": ("0", {"rule": [{"namespace": "ml", "allow": False}]}, Code.NOT_ALLOWED, "rule[0]"),
}


@pytest.mark.parametrize(("value", "raw", "code", "said"), NAMING.values(), ids=NAMING)
def test_what_the_environment_may_not_ask(value: str, raw: Raw, code: Code, said: str) -> None:
    container = make.container(env={"NVIDIA_VISIBLE_DEVICES": value})
    assert said in refusal(container, policy(environment={"may_ask": ["ml"]}, **raw), code)


def test_policy_may_let_the_environment_ask_for_all() -> None:
    trusting = policy(environment={"may_ask": ["ml"], "may_ask_all": True})
    assert len(gpus(make.container(env={"NVIDIA_VISIBLE_DEVICES": "all"}), trusting)) == make.GPUS


@pytest.mark.parametrize(
    ("action", "granted", "noted"), [("allow", True, False), ("audit", True, True), ("deny", False, True)]
)
def test_privileged_containers(action: str, granted: bool, noted: bool) -> None:
    using = policy(privileged={"action": action})
    if not granted:
        assert "privileged.action" in refusal(make.container("1", privileged=True), using, Code.NOT_ALLOWED)
    for claim in ("1", "none", None) if granted else ("none", None):
        decision = decide(make.container(claim, privileged=True), NODE, Ledger(), using)
        assert isinstance(decision, Inject if claim else Pass)
        assert not isinstance(decision, Refuse)
        assert ("it is privileged" in decision.note) is noted
    assert injected(make.container("1"), policy=using).note == ""


@pytest.mark.parametrize(
    ("stale", "age_s", "served"), [("serve", 301.0, True), ("refuse", 300.0, True), ("refuse", 300.1, False)]
)
def test_a_stale_inventory(stale: str, age_s: float, served: bool) -> None:
    node = replace(NODE, inventory_age_s=age_s)
    using = policy(inventory={"stale": stale})
    if served:
        injected(make.container("1"), node, policy=using)
    else:
        assert "last answered 300 s ago" in refusal(make.container("1"), using, Code.NODE_NOT_READY, node)
    injected(make.container("none"), node, policy=using)
