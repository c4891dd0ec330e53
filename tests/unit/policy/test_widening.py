"""Namespaces that may ask by a policy and might not by the one before, asked of both by name; lost restrictions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.widening import EVERY, lost_restrictions, newly_allowed


def policy(*rules: dict[str, Any], **lists: list[str]) -> Policy:
    return parse_policy({"namespaces": lists, "rule": list(rules)}, "policy.toml")


def rule(*namespace: str, allow: bool = True, **more: object) -> dict[str, Any]:
    return {"allow": allow, **({"namespace": list(namespace)} if namespace else {}), **more}


ML = policy(allow=["ml"])
CHANGES: dict[str, tuple[Policy, Policy, tuple[str, ...]]] = {
    "the same": (ML, policy(allow=["ml"]), ()),
    "narrower": (Policy.default(), ML, ()),
    "the defaults": (ML, Policy.default(), ("here", EVERY)),
    "one more": (ML, policy(allow=["ml", "prod"]), ("prod",)),
    "a pattern": (policy(allow=["ml-a"]), policy(allow=["ml-*"]), ("ml-*",)),
    "a pattern with brackets": (policy(allow=["[x]a"]), policy(allow=["[!b-c]a", "[]y]a"]), ("[!b-c]a", "[]y]a")),
    "no longer denied": (policy(allow=["*"], deny=["dev"]), policy(allow=["*"]), ("dev",)),
    "one that only a pod's namespace tells": (policy(allow=["t*"]), policy(allow=["t*", "h?re"]), ("h?re", "here")),
    "a rule that allows": (ML, policy(rule("prod"), allow=["ml"]), ("prod",)),
    "a rule for some pods": (ML, policy(rule("prod", labels={"gpu": "yes"}), allow=["ml"]), ("prod",)),
    "a rule for all": (ML, policy(rule(), allow=["ml"]), ("here", EVERY)),
    "a denial gone": (policy(rule("a", "b", allow=False), rule("b")), policy(rule("a", allow=False)), ("b",)),
    "a denial after": (policy(rule("a", allow=False)), policy(rule("a"), rule("a", allow=False)), ("a",)),
    "a denial of some pods": (
        policy(rule(allow=False)),
        policy(rule("a", allow=False, pod="x-*"), rule("a"), rule(allow=False)),
        ("a",),
    ),
}


@pytest.mark.parametrize(("before", "after", "names"), CHANGES.values(), ids=CHANGES)
def test_who_may_ask_that_might_not(before: Policy, after: Policy, names: tuple[str, ...]) -> None:
    assert newly_allowed(before, after, ("here", "ml")) == names


def test_thousands_of_rules_are_compared_in_time() -> None:
    before, after = (policy(*(rule(f"{team}-{n}-*") for n in range(4000)), allow=[]) for team in "ab")
    began = time.process_time()
    assert len(newly_allowed(before, after, ())) == 4000
    assert time.process_time() - began < 5


WHOLE: dict[str, Any] = {
    "limits": {"gpus_per_pod": 2, "gpus_per_node": 4},
    "capabilities": {"allowed": ["compute"]},
    "modes": {"allowed": ["exclusive"]},
    "privileged": {"action": "deny"},
    "environment": {"disarm": "all"},
    "requirements": {"may_disable": False},
    "inventory": {"stale": "refuse"},
    "mps": {"most_memory_mib": 1024, "most_threads_percent": 50},
    "guard": {"stop_ungranted": True},
    "stray": {"enabled": True},
    "rule": [
        rule("a", name="first"),
        rule("b", allow=False, pod="x-*"),
        rule("c", name="few", limits={"gpus_per_pod": 1}),
    ],
    "pool": [{"name": "big", "device": ["0"], "containers_per_gpu": 2}, {"name": "small", "device": ["1"]}],
}
CUT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "limits": ({}, ("limits.gpus_per_pod", "limits.gpus_per_node")),
    "capabilities": ({}, ("capabilities.allowed",)),
    "modes": ({}, ("modes.allowed",)),
    "privileged": ({}, ("privileged.action",)),
    "environment": ({}, ("environment.disarm",)),
    "requirements": ({}, ("requirements.may_disable",)),
    "inventory": ({}, ("inventory.stale",)),
    "mps": ({}, ("mps.most_memory_mib", "mps.most_threads_percent")),
    "guard": ({}, ("guard.stop_ungranted",)),
    "stray": ({"stray": {"every_s": 5}}, ("stray.enabled",)),
    "rule": ({"rule": WHOLE["rule"][:1]}, ("rule[1]", 'rule[2] "few"')),
    "pool": ({"pool": WHOLE["pool"][:1]}, ("pool small",)),
}


@pytest.mark.parametrize("section", WHOLE)
def test_a_policy_that_was_cut_off(section: str) -> None:
    before = parse_policy(WHOLE, "policy.toml")
    left, lost = CUT[section]
    rest = {key: value for key, value in WHOLE.items() if key != section}
    assert lost_restrictions(before, parse_policy(rest | left, "policy.toml")) == lost
    assert lost_restrictions(before, before) == ()
    assert lost_restrictions(parse_policy(rest, "policy.toml"), before) == ()


def test_another_limit_pool_or_rule_is_no_loss() -> None:
    before = parse_policy(WHOLE, "policy.toml")
    other = {
        **WHOLE,
        "limits": {"gpus_per_pod": 8, "gpus_per_node": 1},
        "pool": [*WHOLE["pool"], WHOLE["pool"][0] | {"name": "x"}],
        "rule": WHOLE["rule"][1:],
    }
    assert lost_restrictions(before, parse_policy(other, "policy.toml")) == ()


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        (rule("c", name="few", limits={"gpus_per_pod": 1}), rule("c", name="few"), ('rule[1] "few" limits',)),
        (rule("c", modes=["shared"], pool=["big"]), rule("c", modes=["shared"]), ("rule[1] pool",)),
        (rule("c", pod="x-*", reason="a"), rule("c"), ("rule[1] pod",)),
        (rule("c", allow=False, pod="x-*"), rule("c", allow=False), ()),
        (
            rule("c", limits={"gpus_per_pod": 1, "gpus_per_namespace": 2}),
            rule("c", limits={"gpus_per_pod": 1}),
            ("rule[1] limits",),
        ),
        (rule("c", limits={"gpus_per_pod": 1}), rule("c", limits={"gpus_per_pod": 2}), ()),
        (rule("c", limits={"gpus_per_pod": 1}), rule("d"), ()),
    ],
)
def test_a_policy_that_was_cut_off_within_its_last_rule(
    old: dict[str, Any], new: dict[str, Any], lost: tuple[str, ...]
) -> None:
    before, after = (parse_policy(WHOLE | {"rule": [WHOLE["rule"][0], each]}, "policy.toml") for each in (old, new))
    assert lost_restrictions(before, after) == lost


def test_what_is_said_of_a_pool_may_be_lost() -> None:
    """How many share its GPUs, and that a driver offers no others."""
    less = [{key: value for key, value in each.items() if key != "containers_per_gpu"} for each in WHOLE["pool"]]
    before = parse_policy(WHOLE | {"kubelet": {"pool": "big"}, "dra": {"pool": "big"}}, "policy.toml")
    lost = lost_restrictions(before, parse_policy(WHOLE | {"pool": less}, "policy.toml"))
    assert lost == ("pool big containers_per_gpu", "kubelet.pool", "dra.pool")


def test_a_table_of_resources_is_a_restriction_too() -> None:
    before = parse_policy(WHOLE | {"kubelet": {"resources": {"nvidia.com/gpu": "big"}}}, "policy.toml")
    assert "kubelet.resources" in lost_restrictions(before, parse_policy(WHOLE, "policy.toml"))
