"""Who a rule is about, what its verdict says, and how few rules are looked at among thousands."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Qos
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capability
from nri_gpu.policy.parse import parse_policy
from nri_gpu.policy.select import Allowed, Denied, Ignored, select
from tests.support import builders as make

SYSTEMD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"
POD = make.pod(
    "train-7",
    namespace="ml-dev",
    labels={"team": "vision", "example.com/tier": ""},
    runtime_handler="runc-gpu",
    cgroup_parent=SYSTEMD,
)
CONTAINER = make.container(of=POD, name="main")

ABOUT: dict[str, tuple[dict[str, Any], bool]] = {
    "everybody": ({}, True),
    "namespace": ({"namespace": "ml-dev"}, True),
    "namespace of several": ({"namespace": ["x", "ml-*"]}, True),
    "another namespace": ({"namespace": ["x", "ml"]}, False),
    "pod": ({"pod": "train-?"}, True),
    "another pod": ({"pod": "train"}, False),
    "container": ({"container": "m[a-z]in"}, True),
    "another container": ({"container": "side"}, False),
    "handler": ({"runtime_handler": "*-gpu"}, True),
    "another handler": ({"runtime_handler": "kata"}, False),
    "label": ({"labels": {"team": "vis*"}}, True),
    "label that is empty": ({"labels": {"example.com/tier": "*"}}, True),
    "another value": ({"labels": {"team": "audio"}}, False),
    "label that is not there": ({"labels": {"owner": "*"}}, False),
    "one label of two": ({"labels": {"team": "vision", "owner": "*"}}, False),
    "class": ({"qos": "burstable"}, True),
    "class of several": ({"qos": ["guaranteed", "burstable"]}, True),
    "another class": ({"qos": "besteffort"}, False),
    "all at once": ({"namespace": "ml-*", "pod": "*", "qos": "burstable", "labels": {"team": "vision"}}, True),
    "all but one": ({"namespace": "ml-*", "pod": "*", "qos": "guaranteed", "labels": {"team": "vision"}}, False),
}


@pytest.mark.parametrize(("whom", "about"), ABOUT.values(), ids=ABOUT)
def test_whom_a_rule_is_about(whom: dict[str, Any], about: bool) -> None:
    policy = parse_policy({"namespaces": {"allow": []}, "rule": [{**whom, "allow": True}]}, "f")
    assert isinstance(select(policy, CONTAINER), Allowed) is about


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


def test_the_first_that_matches_decides_and_is_named() -> None:
    rules = [{"name": "one", "pod": "x", "allow": False}, {"name": "two", "allow": True}, {"allow": False}]
    verdict = select(parse_policy({"rule": rules}, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    assert (verdict.rule, verdict.terms.path) == ('rule[1] "two"', "rule[1]")


def test_where_none_matches_the_lists_decide() -> None:
    raw = {"namespaces": {"allow": ["a", "ml-*"]}, "rule": [{"namespace": "x", "allow": False}]}
    verdict = select(parse_policy(raw, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    assert verdict.rule == "namespaces.allow[1]"


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
                "default_extras": ["profile"],
                "extras": ["profile", "rdma"],
                "limits": {"gpus_per_pod": "unlimited"},
            }
        ],
    }
    verdict = select(parse_policy(raw, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    terms = verdict.terms
    assert terms.mode is Mode.SHARED
    assert terms.capabilities == {Capability.UTILITY}
    assert terms.denied_mode(Mode.SHARED) == ""
    assert "mode exclusive may not be asked for: rule[0].modes in f lists shared" in terms.denied_mode(Mode.EXCLUSIVE)
    assert terms.denied_capabilities(frozenset({Capability.GRAPHICS})) == ""
    assert "rule[0].capabilities in f" in terms.denied_capabilities(frozenset({Capability.COMPUTE}))
    assert terms.extras.asked == {Extra.PROFILE}
    assert terms.denied_extras(frozenset({Extra.RDMA})) == ""
    assert "extras drm may not be asked for: rule[0].extras in f" in terms.denied_extras(frozenset({Extra.DRM}))
    assert (terms.limits.gpus_per_pod > 10**6, terms.limits.gpus_per_node) == (True, 4)
    assert terms.limit_path("gpus_per_pod") == "rule[0].limits.gpus_per_pod"
    assert terms.limit_path("gpus_per_node") == "limits.gpus_per_node"


def test_without_a_rule_the_whole_policy_speaks() -> None:
    verdict = select(parse_policy({"modes": {"allowed": ["exclusive"]}}, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    assert "modes.allowed in f lists exclusive" in verdict.terms.denied_mode(Mode.SHARED)


THOUSANDS = 4000
MANY: dict[str, list[dict[str, Any]]] = {
    "a namespace each": [{"namespace": f"ns-{n}", "pod": f"p-{n}-*"} for n in range(THOUSANDS)],
    "one namespace": [{"namespace": "ml-dev", "pod": f"p-{n}-*"} for n in range(THOUSANDS)],
    "a pattern each": [{"namespace": f"ns-{n}-*"} for n in range(THOUSANDS)],
    "an ending each": [{"namespace": "*", "pod": f"*-{n}-x"} for n in range(THOUSANDS)],
    "a list each": [{"namespace": [f"a-{n}", f"b-{n}-*"], "container": "main"} for n in range(THOUSANDS)],
    "one beginning, an end each": [{"pod": f"train-*-{n}"} for n in range(THOUSANDS)],
    "a label each": [{"labels": {"team": f"t{n}"}} for n in range(THOUSANDS)],
}


@pytest.mark.parametrize("whom", MANY.values(), ids=MANY)
def test_among_thousands_the_first_that_matches_decides(whom: list[dict[str, Any]]) -> None:
    rules = [{**each, "allow": False} for each in whom] + [{"pod": "train-*", "allow": True}]
    verdict = select(parse_policy({"rule": rules}, "f"), CONTAINER)
    assert isinstance(verdict, Allowed)
    assert verdict.rule == f"rule[{THOUSANDS}]"
