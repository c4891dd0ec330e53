"""Namespaces that may ask by a policy and might not by the one before: asked of both, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.widening import EVERY, newly_allowed


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
