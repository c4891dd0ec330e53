"""Whether a container may ask at all, and which rule says so: `[[rule]]` first, then the lists of namespaces."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.value import Value
from nri_gpu.policy.model import Otherwise, Policy
from nri_gpu.policy.rules import Rule
from nri_gpu.policy.terms import Terms, shown_source
from nri_gpu.policy.text import quoted


class Allowed(Value, frozen=True):
    """It may ask. rule: what allowed it, `namespaces.allow[0]`. terms: what it may have."""

    aside: ClassVar = ("terms",)

    rule: str
    terms: Terms


class Denied(Struct, frozen=True):
    """It may not, and must not be created. sentence: why, and what to change."""

    sentence: str


class Ignored(Struct, frozen=True):
    """It may not, and starts as if it had not asked. sentence: why."""

    sentence: str


Verdict = Allowed | Denied | Ignored


def select(policy: Policy, container: Container) -> Verdict:
    """What policy says of a container that asks."""
    index = policy.rule.first(container)
    if index is not None:
        return _by_rule(policy, container, index)
    namespace = container.pod.namespace
    rules = policy.namespaces
    denied = rules.deny.first(namespace)
    if denied is not None:
        return _may_not(policy, namespace, f'namespaces.deny[{denied}] = "{rules.deny.patterns[denied]}" denies it')
    allowed = rules.allow.first(namespace)
    if allowed is None:
        return _may_not(policy, namespace, _not_listed(len(rules.allow.patterns)))
    return Allowed(f"namespaces.allow[{allowed}]", Terms(policy=policy))


def _by_rule(policy: Policy, container: Container, index: int) -> Verdict:
    rule = policy.rule.rules[index]
    called = _called(rule, index)
    if rule.allow:
        return Allowed(called, Terms(policy=policy, rule=rule, path=f"rule[{index}]"))
    pod = container.pod
    who = f"container {quoted(container.name)} of pod {quoted(f'{pod.namespace}/{pod.name}')}"
    why = f"{who} may not ask for GPUs: {called} in {shown_source(policy)} says no{rule.reason and f' ({rule.reason})'}"
    if rule.otherwise is Otherwise.IGNORE:
        return Ignored(f"{why}, and has its request ignored.")
    return Denied(f"{why}; change that rule, or what it matches the pod by.")


def _called(rule: Rule, index: int) -> str:
    """`rule[2] "batch"`."""
    return f'rule[{index}] "{rule.name}"' if rule.name else f"rule[{index}]"


def _not_listed(patterns: int) -> str:
    if patterns == 0:
        return "namespaces.allow is empty"
    return (
        "the pattern of namespaces.allow does not match it"
        if patterns == 1
        else (f"none of the {patterns} patterns of namespaces.allow matches it")
    )


def _may_not(policy: Policy, namespace: str, why: str) -> Denied | Ignored:
    source = shown_source(policy)
    who = f"namespace {quoted(namespace)} may not ask for GPUs: {why}"
    if policy.namespaces.otherwise is Otherwise.IGNORE:
        return Ignored(f"{who} in {source}, and namespaces.otherwise is ignore.")
    return Denied(f"{who} in {source}; change that list, or run the pod in a namespace that may ask.")
