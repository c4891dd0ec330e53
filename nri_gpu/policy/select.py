"""Whether a container may ask at all, and which rule says so. `[[rule]]` sections will be looked up here too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nri_gpu.domain.container import Container
from nri_gpu.domain.extras import Extra
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.policy.model import Otherwise, Policy
from nri_gpu.policy.text import quoted

_SOURCE_SHOWN_MAX: Final = 160  # characters of the file's path


@dataclass(frozen=True, slots=True)
class Allowed:
    """It may ask. rule: what allowed it, `namespaces.allow[0]`."""

    rule: str


@dataclass(frozen=True, slots=True)
class Denied:
    """It may not, and must not be created. sentence: why, and what to change."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """It may not, and starts as if it had not asked. sentence: why."""

    sentence: str


Verdict = Allowed | Denied | Ignored


def select(policy: Policy, container: Container) -> Verdict:
    """What policy says of a container that asks."""
    namespace = container.pod.namespace
    rules = policy.namespaces
    denied = rules.deny.first(namespace)
    if denied is not None:
        return _may_not(policy, namespace, f'namespaces.deny[{denied}] = "{rules.deny.patterns[denied]}" denies it')
    allowed = rules.allow.first(namespace)
    if allowed is None:
        return _may_not(policy, namespace, _not_listed(len(rules.allow.patterns)))
    return Allowed(f"namespaces.allow[{allowed}]")


def denied_capabilities(policy: Policy, capabilities: Capabilities) -> str:
    """Why a container may not have these parts of the driver; empty when it may. capabilities: closed."""
    if capabilities <= policy.capabilities.allowed:
        return ""
    denied = [each for each in Capability if each in capabilities - policy.capabilities.allowed]
    brought = [each for each in denied if any(each in closure(frozenset({other})) for other in capabilities - {each})]
    why = f" ({', '.join(brought)} is brought along by another)" if brought else ""
    source = quoted(policy.source, _SOURCE_SHOWN_MAX)[1:-1]
    return (
        f"capabilities {', '.join(denied)} may not be asked for{why}: capabilities.allowed in {source} does not list "
        "them; change that list, or ask without."
    )


def denied_extras(policy: Policy, asked: frozenset[Extra]) -> str:
    """Why a container may not have these extras; empty when it may."""
    if asked <= policy.extras.allowed:
        return ""
    denied = ", ".join(each for each in Extra if each in asked - policy.extras.allowed)
    source = quoted(policy.source, _SOURCE_SHOWN_MAX)[1:-1]
    return (
        f"extras {denied} may not be asked for: extras.allowed in {source} does not list them; "
        "change that list, or ask without."
    )


def _not_listed(patterns: int) -> str:
    if patterns == 0:
        return "namespaces.allow is empty"
    return (
        "the pattern of namespaces.allow does not match it"
        if patterns == 1
        else (f"none of the {patterns} patterns of namespaces.allow matches it")
    )


def _may_not(policy: Policy, namespace: str, why: str) -> Denied | Ignored:
    source = quoted(policy.source, _SOURCE_SHOWN_MAX)[1:-1]
    who = f"namespace {quoted(namespace)} may not ask for GPUs: {why}"
    if policy.namespaces.otherwise is Otherwise.IGNORE:
        return Ignored(f"{who} in {source}, and namespaces.otherwise is ignore.")
    return Denied(f"{who} in {source}; change that list, or run the pod in a namespace that may ask.")
