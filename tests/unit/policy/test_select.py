"""Who may ask."""

from __future__ import annotations

import pytest

from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability, closure
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import parse_policy
from nri_gpu.policy.select import Allowed, Denied, Ignored, Terms, select


def policy(**rules: object) -> Policy:
    return parse_policy({"namespaces": rules}, "/etc/nri-gpu/policy.toml")


def container(namespace: str) -> Container:
    pod = Pod(id=PodId("p"), uid=PodUid("u"), name="pod", namespace=namespace)
    return Container(id=ContainerId("c"), name="main", pod=pod)


ALLOWED = {
    "everybody by default": ({}, "anything", "namespaces.allow[0]"),
    "a pod without a namespace": ({}, "", "namespaces.allow[0]"),
    "by name": ({"allow": ["a", "b"]}, "b", "namespaces.allow[1]"),
    "the first that matches": ({"allow": ["x", "m*", "ml"]}, "ml", "namespaces.allow[1]"),
    "by one character": ({"allow": ["team-?"]}, "team-a", "namespaces.allow[0]"),
    "by a range": ({"allow": ["team-[a-c]"]}, "team-b", "namespaces.allow[0]"),
    "denial of others": ({"deny": ["kube-*"]}, "default", "namespaces.allow[0]"),
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
    "deny wins": ({"allow": ["a"], "deny": ["a"]}, "a", 'namespaces.deny[0] = "a" denies it'),
    "the whole name counts": ({"allow": ["ml"]}, "ml-dev", "does not match it"),
    "case counts": ({"allow": ["ml"]}, "ML", "does not match it"),
    "a range left out": ({"allow": ["team-[!a]"]}, "team-a", "does not match it"),
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


def test_hostile_names_and_long_paths_leave_the_sentence_whole() -> None:
    strict = parse_policy({"namespaces": {"allow": [], "deny": ["*" * 200 + "b"]}}, "/" + "d/" * 400)
    verdict = select(strict, container("\n\u20ac" * 5000))
    assert isinstance(verdict, Denied)
    assert verdict.sentence.isascii()
    assert verdict.sentence.isprintable()
    assert str(Reason(Code.NOT_ALLOWED, verdict.sentence)).endswith("may ask.")


def test_denied_capabilities_are_named_with_the_list() -> None:
    rules = parse_policy({"capabilities": {"allowed": ["compute", "utility"]}}, "/etc/nri-gpu/policy.toml")
    assert Terms(policy=rules).denied_capabilities(DEFAULT_CAPABILITIES) == ""
    sentence = Terms(policy=rules).denied_capabilities(closure(frozenset({Capability.DISPLAY, Capability.UTILITY})))
    assert sentence == (
        "capabilities graphics, display may not be asked for (graphics is brought along by another): "
        "capabilities.allowed in /etc/nri-gpu/policy.toml does not list them; change that list, or ask without."
    )


def test_denied_extras_are_named_with_the_list() -> None:
    terms = Terms(policy=parse_policy({"extras": {"allowed": ["rdma"]}}, "/etc/nri-gpu/policy.toml"))
    assert terms.denied_extras(frozenset({Extra.RDMA})) == terms.denied_extras(frozenset()) == ""
    assert terms.denied_extras(frozenset({Extra.MIG_CONFIG, Extra.DRM, Extra.RDMA})) == (
        "extras drm, mig-config may not be asked for: extras.allowed in /etc/nri-gpu/policy.toml does not list them; "
        "change that list, or ask without."
    )
