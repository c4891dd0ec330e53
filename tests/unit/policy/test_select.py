"""Who may ask: by the lists of namespaces, or by the first rule that matches; and what they may have."""

from __future__ import annotations

import pytest

from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability, PciBusId, closure
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.select import Allowed, Denied, Ignored, Terms, allocates_all, select
from tests.support import builders as make


def policy(**rules: object) -> Policy:
    return parse_policy({"namespaces": rules}, "/etc/nri-gpu/policy.toml")


def container(namespace: str) -> Container:
    return make.container(of=make.pod("pod", namespace=namespace), name="main")


ALLOWED = {
    "everybody by default": ({}, "anything", "namespaces.allow[0]"),
    "by name": ({"allow": ["a", "b"]}, "b", "namespaces.allow[1]"),
    "the first that matches": ({"allow": ["x", "m*", "ml"]}, "ml", "namespaces.allow[1]"),
}


@pytest.mark.parametrize(("rules", "namespace", "rule"), ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed_by_which_rule(rules: dict[str, object], namespace: str, rule: str) -> None:
    verdict = select(policy(**rules), container(namespace))
    assert isinstance(verdict, Allowed)
    assert (verdict.rule, verdict.terms.rule) == (rule, None)


DENIED = {
    "not listed": ({"allow": ["a"]}, "b", "the pattern of namespaces.allow does not match it"),
    "none of several": ({"allow": ["a", "c"]}, "b", "none of the 2 patterns of namespaces.allow matches it"),
    "nobody may": ({"allow": []}, "b", "namespaces.allow is empty"),
    "denied": ({"deny": ["x", "kube-*"]}, "kube-system", 'namespaces.deny[1] = "kube-*" denies it'),
    "the whole name counts": ({"allow": ["ml"]}, "ml-dev", "does not match it"),
    "a line break is no end": ({"allow": ["ml"]}, "ml\n", "does not match it"),
}


@pytest.mark.parametrize(("rules", "namespace", "why"), DENIED.values(), ids=DENIED.keys())
def test_denied_and_told_what_to_change(rules: dict[str, object], namespace: str, why: str) -> None:
    verdict = select(policy(**rules), container(namespace))
    assert isinstance(verdict, Denied)
    assert why in verdict.sentence
    assert "in /etc/nri-gpu/policy.toml; change that list" in verdict.sentence


@pytest.mark.parametrize(("rules", "namespace", "why"), DENIED.values(), ids=DENIED.keys())
def test_ignored_where_the_policy_says_so(rules: dict[str, object], namespace: str, why: str) -> None:
    verdict = select(policy(otherwise="ignore", **rules), container(namespace))
    assert isinstance(verdict, Ignored)
    assert why in verdict.sentence


def test_denied_capabilities_are_named_with_the_list() -> None:
    rules = parse_policy({"capabilities": {"allowed": ["compute", "utility"]}}, "/etc/nri-gpu/policy.toml")
    assert Terms(policy=rules).denied_capabilities(DEFAULT_CAPABILITIES) is None
    reason = Terms(policy=rules).denied_capabilities(closure(frozenset({Capability.DISPLAY, Capability.UTILITY})))
    assert reason
    assert reason.sentence == (
        "capabilities graphics, display may not be asked for (graphics is brought along by another): "
        "capabilities.allowed in /etc/nri-gpu/policy.toml does not list them; change that list, or ask without."
    )


def test_denied_extras_are_named_with_the_list() -> None:
    terms = Terms(policy=parse_policy({"extras": {"allowed": ["rdma"]}}, "/etc/nri-gpu/policy.toml"))
    assert terms.denied_extras(frozenset({Extra.RDMA})) is terms.denied_extras(frozenset()) is None
    reason = terms.denied_extras(frozenset({Extra.MIG_CONFIG, Extra.DRM, Extra.RDMA}))
    assert reason
    assert reason.sentence == (
        "extras drm, mig-config may not be asked for: extras.allowed in /etc/nri-gpu/policy.toml does not list them; "
        "change that list, or ask without."
    )


SYSTEMD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"
POD = make.pod(
    "train-7",
    namespace="ml-dev",
    labels={"team": "vision", "example.com/tier": ""},
    runtime_handler="runc-gpu",
    cgroup_parent=SYSTEMD,
)
CONTAINER = make.container(of=POD, name="main")


CLASSES = {
    "/kubepods/burstable/pod1": Qos.BURSTABLE,
    "/kubepods/besteffort/pod1": Qos.BESTEFFORT,
    "/kubepods/pod1": Qos.GUARANTEED,
    "kubepods-besteffort-pod1.slice": Qos.BESTEFFORT,
    "/kubepods.slice/kubepods-pod1.slice": Qos.GUARANTEED,
    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable-pod1.slice": Qos.BURSTABLE,
    SYSTEMD: Qos.BURSTABLE,
    "": None,
    "/kubepods": None,
    "/kubepods.slice": None,
    "/kubepodsburstable": None,
    "/k8s.io/1": None,
}


@pytest.mark.parametrize(("parent", "qos"), CLASSES.items())
def test_the_service_class_is_read_off_the_cgroup(parent: str, qos: Qos | None) -> None:
    assert make.pod(cgroup_parent=parent).qos is qos


@pytest.mark.parametrize("name", ["10000:3b:00.0", "00010000:3b:00.0"])
def test_a_pool_names_a_gpu_of_a_long_pci_domain(name: str) -> None:
    pools = parse_policy({"pool": [{"name": "a", "device": [name]}]}, "f").pool
    far, near = make.gpu(0, pci_bus_id=PciBusId("10000:3b:00.0")), make.gpu(1, pci_bus_id=PciBusId("0000:3b:00.0"))
    assert [pools.of(gpu) is not None for gpu in (far, near)] == [True, False]


def test_an_unknown_number_fits_no_bound_of_a_pool() -> None:
    dark, known = make.gpu(0, memory_bytes=None), make.gpu(1)
    for bound in ("memory_at_least", "memory_at_most"):
        pools = parse_policy({"pool": [{"name": "a", bound: "40Gi"}]}, "f").pool
        assert [pools.of(gpu) is not None for gpu in (dark, known)] == [False, True]


# A criterion of a rule, a value by which CONTAINER fits it, and one by which it does not.
CRITERIA: dict[str, tuple[object, object]] = {
    "namespace": ("ml-*", "prod"),
    "pod": ("train-*", "serve-*"),
    "container": ("main", "side"),
    "runtime_handler": ("runc-gpu", "kata"),
    "qos": ("burstable", "guaranteed"),
    "labels": ({"team": "vis*", "example.com/tier": ""}, {"team": "speech"}),
}


@pytest.mark.parametrize(("key", "values"), CRITERIA.items(), ids=CRITERIA)
def test_a_rule_is_for_those_who_fit_it(key: str, values: tuple[object, object]) -> None:
    fits, other = (parse_policy({"rule": [{key: value, "allow": True}]}, "f").rule.rules[0] for value in values)
    assert (fits.matches(CONTAINER), other.matches(CONTAINER)) == (True, False)
    if key == "labels":
        assert not fits.matches(make.container(of="unlabelled"))


def test_the_first_that_matches_decides_and_is_named() -> None:
    rules = [{"name": "one", "pod": "x", "allow": False}, {"name": "two", "allow": True}, {"allow": False}]
    verdict = select(parse_policy({"rule": rules}, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    assert (verdict.rule, verdict.terms.path) == ('rule[1] "two"', "rule[1]")


def test_a_denial_says_which_rule_and_why() -> None:
    rule = {"name": "night", "allow": False, "reason": "batch runs at night"}
    verdict = select(parse_policy({"rule": [rule]}, "/etc/p.toml"), CONTAINER)
    assert verdict == Denied(
        'container "main" of pod "ml-dev/train-7" may not ask for GPUs: rule[0] "night" in /etc/p.toml denies it '
        "(batch runs at night); change that rule, or what it matches the pod by."
    )
    ignored = select(parse_policy({"rule": [{**rule, "otherwise": "ignore"}]}, "f"), CONTAINER)
    assert isinstance(ignored, Ignored)
    assert "rule[0]" in ignored.sentence


def test_the_longest_denial_is_still_whole() -> None:
    pod = make.pod("\u20ac" * 300, namespace="\n" * 300)
    rule = {"name": "n" * 64, "allow": False, "reason": "r" * 200}
    verdict = select(parse_policy({"rule": [rule]}, "/" + "d" * 400), make.container(of=pod, name="c" * 300))
    assert isinstance(verdict, Denied)
    text = str(Reason(Code.NOT_ALLOWED, verdict.sentence))
    assert text.endswith("matches the pod by.")
    assert len(text) < REFUSAL_MAX


def test_a_rule_s_word_stands_in_place_of_the_policy_s() -> None:
    raw = {
        "modes": {"allowed": ["exclusive"]},
        "capabilities": {"allowed": ["compute", "utility"]},
        "limits": {"gpus_per_pod": 1, "gpus_per_node": 4},
        "rule": [
            {
                "allow": True,
                "default_mode": "shared",
                "modes": ["shared"],
                "default_capabilities": ["utility"],
                "capabilities": ["utility", "graphics"],
                "default_extras": ["gds"],
                "extras": ["gds", "rdma"],
                "limits": {"gpus_per_pod": "unlimited"},
            }
        ],
    }
    verdict = select(parse_policy(raw, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    terms = verdict.terms
    assert terms.mode is Mode.SHARED
    assert terms.capabilities == {Capability.UTILITY}
    assert terms.denied_mode(Mode.SHARED) is None
    assert "mode exclusive may not be asked for: rule[0].modes in f lists shared" in str(
        terms.denied_mode(Mode.EXCLUSIVE)
    )
    assert terms.denied_capabilities(frozenset({Capability.GRAPHICS})) is None
    assert "rule[0].capabilities in f" in str(terms.denied_capabilities(frozenset({Capability.COMPUTE})))
    assert terms.extras.asked == {Extra.GDS}
    assert terms.denied_extras(frozenset({Extra.RDMA})) is None
    assert "extras drm may not be asked for: rule[0].extras in f" in str(terms.denied_extras(frozenset({Extra.DRM})))
    assert (terms.limits.gpus_per_pod > 10**6, terms.limits.gpus_per_node) == (True, 4)
    assert terms.limit_path("gpus_per_pod") == "rule[0].limits.gpus_per_pod"
    assert terms.limit_path("gpus_per_node") == "limits.gpus_per_node"


KUBELET = {"enabled": True, "pool": "cluster"}
CLUSTER = {"name": "cluster", "model": ["*"]}
CHART = {"kubelet": KUBELET, "pool": [CLUSTER]}
OWN_POOL = {"name": "local", "device": ["0"], "namespaces": ["lab"]}
BESIDE = {"kubelet": {**KUBELET, "resource": "a/b", "inject_for": ["nvidia.com/gpu"]}}
ALLOCATED_ALONE: dict[str, tuple[dict[str, object], bool]] = {
    "as the chart has it": ({**CHART}, True),
    "by claims": ({"dra": KUBELET, "pool": [CLUSTER]}, True),
    "the defaults": ({}, False),
    "without a pool": ({"kubelet": {"enabled": True}}, False),
    "a pool of its own": ({**CHART, "pool": [OWN_POOL, CLUSTER]}, False),
    "a pool for some GPUs": ({**CHART, "pool": [{"name": "cluster", "model": ["*H100*"]}]}, False),
    "a pool that namespaces may have": ({**CHART, "pool": [{**CLUSTER, "namespaces": ["lab"]}]}, False),
    "a rule that opens the pool": ({**CHART, "rule": [{"pod": "*", "allow": True, "pool": "cluster"}]}, False),
    "an environment that asks": ({**CHART, "environment": {"may_ask": ["lab"]}}, False),
    "another device plugin": ({**CHART, **BESIDE}, False),
}


@pytest.mark.parametrize(("raw", "alone"), ALLOCATED_ALONE.values(), ids=ALLOCATED_ALONE)
def test_whether_only_the_kubelet_and_claims_allocate(raw: dict[str, object], alone: bool) -> None:
    assert allocates_all(parse_policy(raw, "f")) is alone
    assert not allocates_all(Policy.broken("a fault"))
