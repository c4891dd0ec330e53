"""Namespaces that may ask for GPUs under one policy and might not under the policy before it, and lost restrictions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from nri_gpu.policy.forms import EVERYTHING, Globs
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import LIMIT_KEYS, Rule, RuleList

EVERY: Final = "every namespace"
_UNNAMED: Final = "~named by no policy~"  # no namespace is called so, and only a pattern for nearly all matches it
_BRACKETS: Final = re.compile(r"\[(!?)(\]?[^\]]*)\]")
_NARROWS: Final = ("pod", "container", "runtime_handler", "labels", "qos")
_RULE_RESTRICTS: Final = ("modes", "capabilities", "extras", "pool", "limits")
_DEFAULT: Final = Policy.default()
# Settings whose default allows most, or looks at least.
_RESTRICTS: Final = (
    *(("limits", key) for key in LIMIT_KEYS),
    *(("capabilities", "allowed"), ("modes", "allowed"), ("privileged", "action"), ("environment", "disarm")),
    *(("requirements", "may_disable"), ("inventory", "stale"), ("kubelet", "pool"), ("dra", "pool")),
    ("kubelet", "resources"),
    *(("mps", "most_memory_mib"), ("mps", "most_threads_percent"), ("guard", "stop_ungranted"), ("stray", "enabled")),
)


def newly_allowed(before: Policy, after: Policy, present: Iterable[str]) -> tuple[str, ...]:
    """Return the namespaces from which some container may ask now and none might before; `EVERY` is the last.

    The namespaces that count are those that either policy names (a pattern stands for a namespace that it matches),
    those that are present on the node, and a namespace that neither policy names.
    """
    if (before.rule, before.namespaces) == (after.rule, after.namespaces):
        return ()
    may, might = _Askers(after), _Askers(before)
    names = {*_named(before), *_named(after), *present}
    asked = {each: _BRACKETS.sub(_member, each) for each in sorted(names)} | {EVERY: _UNNAMED}
    return tuple(shown for shown, name in asked.items() if may.has(name) and not might.has(name))


def lost_restrictions(before: Policy, after: Policy) -> tuple[str, ...]:
    """Return the rules and pools that are gone, and the keys of restrictions that are gone or back at their default.

    A policy file that was cut off has lost its last tables, and perhaps the last keys of the table before: its rules
    are the first of those before.
    """
    pools = {pool.name: pool for pool in after.pool.pools}
    gone = (f"pool {pool.name}" for pool in before.pool.pools if pool.name not in pools)
    crowded = (
        f"pool {pool.name} containers_per_gpu"
        for pool in before.pool.pools
        if pool.containers_per_gpu and pool.name in pools and not pools[pool.name].containers_per_gpu
    )
    keys = (
        f"{section}.{key}"
        for section, key in _RESTRICTS
        if _value(before, section, key) != _value(after, section, key) == _value(_DEFAULT, section, key)
    )
    return (*_cut_rules(before.rule, after.rule.rules), *gone, *crowded, *keys)


def _cut_rules(before: RuleList, after: tuple[Rule, ...]) -> Iterator[str]:
    """Yield the restrictions of rules that were cut off; the last rule that is left may lack keys."""
    rules, kept = before.rules, len(after)
    if rules[:kept] != after:
        if kept > len(rules) or rules[: kept - 1] != after[:-1]:
            return
        old, left = rules[kept - 1], after[-1]
        lacks = {key: getattr(left, key) for key in Rule.__struct_fields__ if _lacks(key, old, left)}
        if replace(old, **lacks) != left:
            return  # another rule
        keys = _RULE_RESTRICTS + (_NARROWS if old.allow else ())
        yield from (
            f"{before.called(kept - 1)} {key}" for key in keys if key in lacks and getattr(old, key) is not None
        )
    yield from (before.called(index) for index in range(kept, len(rules)) if _restricts(rules[index]))


def _lacks(key: str, old: Rule, left: Rule) -> bool:
    """Return whether a rule does not have a key, or not all labels or limits of another."""
    value = getattr(left, key)
    return value in (None, "") or (isinstance(value, tuple) and {*value} < {*(getattr(old, key) or ())})


def _restricts(rule: Rule) -> bool:
    return not rule.allow or any(getattr(rule, key) is not None for key in _RULE_RESTRICTS)


def _value(policy: Policy, section: str, key: str) -> object:
    return getattr(getattr(policy, section), key)


def _named(policy: Policy) -> Iterator[str]:
    lists = (policy.namespaces.allow, policy.namespaces.deny, *(rule.namespace for rule in policy.rule.rules))
    return (pattern for globs in lists if globs for pattern in globs.patterns if pattern.strip("*"))


def _member(brackets: re.Match[str]) -> str:
    return "~" if brackets[1] else brackets[2][0]


class _Askers:
    """The namespaces that may ask by one policy: some container there may, since a pod's creator chooses the rest."""

    def __init__(self, policy: Policy) -> None:
        deciding = (rule for rule in policy.rule.rules if rule.allow or _is_for_all(rule))
        # Neighbours that say the same are tried at once: there may be thousands.
        self._steps: list[tuple[bool, Globs]] = [
            (allow, _together(rules)) for allow, rules in groupby(deciding, key=lambda rule: rule.allow)
        ]
        self._lists = policy.namespaces

    def has(self, namespace: str) -> bool:
        allow = next((allow for allow, globs in self._steps if globs.match(namespace)), None)
        if allow is not None:
            return allow
        return self._lists.allow.match(namespace) and not self._lists.deny.match(namespace)


def _is_for_all(rule: Rule) -> bool:
    return all(getattr(rule, key) is None for key in _NARROWS)


def _together(rules: Iterable[Rule]) -> Globs:
    return Globs(tuple(pattern for rule in rules for pattern in (rule.namespace or EVERYTHING).patterns))
