"""Advice on rules and pools; also on rules that never decide because an earlier rule matches all they match.

Rules are compared by their patterns alone: what is said is certain, and what cannot be told that way is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from nri_gpu.domain.finding import Finding, in_policy
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted
from nri_gpu.policy.forms import UNLIMITED, Globs, is_literal
from nri_gpu.policy.model import Policy, PrivilegedAction, Stale
from nri_gpu.policy.rules import LIMIT_KEYS, Pool, Rule
from nri_gpu.policy.select import Terms

# Each rule is compared with so many earlier ones, and as many about its own namespace, so that `check` ends soon.
BROAD_MAX: Final = 256
_NAMES: Final = ("namespace", "pod", "container", "runtime_handler")


def shadowed(rules: tuple[Rule, ...]) -> Iterator[tuple[int, int]]:
    """Yield the index of each rule that can never decide, and of the earlier rule because of which."""
    broad: list[int] = []
    of_namespace: dict[str, list[int]] = {}
    for index, rule in enumerate(rules):
        own = rule.namespace.patterns if rule.namespace and all(map(is_literal, rule.namespace.patterns)) else ()
        earlier = sorted(
            {*broad[:BROAD_MAX], *(each for name in own for each in of_namespace.get(name, [])[:BROAD_MAX])}
        )
        before = next((each for each in earlier if covers(rules[each], rule)), None)
        if before is not None:
            yield index, before
            continue  # the earlier rule covers all that it covers
        for name in own:
            of_namespace.setdefault(name, []).append(index)
        if not own:
            broad.append(index)


def covers(broad: Rule, narrow: Rule) -> bool:
    """Return whether everything that the narrow rule matches is matched by the broad one."""
    return (
        all(_globs_cover(getattr(broad, name), getattr(narrow, name)) for name in _NAMES)
        and (broad.qos is None or (narrow.qos is not None and narrow.qos <= broad.qos))
        and _labels_cover(broad, narrow)
    )


def _labels_cover(broad: Rule, narrow: Rule) -> bool:
    wanted = dict(narrow.labels or ())
    return all(key in wanted and _globs_cover(globs, wanted[key]) for key, globs in broad.labels or ())


def _globs_cover(broad: Globs | None, narrow: Globs | None) -> bool:
    if broad is None:
        return True
    patterns = ("*",) if narrow is None else narrow.patterns
    # A label must be there to match at all, and any other name always is: `*` and no pattern then mean the same.
    return all(any(pattern_covers(one, other) for one in broad.patterns) for other in patterns)


def pattern_covers(broad: str, narrow: str) -> bool:
    """Return whether a pattern matches whatever another pattern does."""
    if broad in (narrow, "*"):
        return True
    if is_literal(narrow):
        return fnmatchcase(narrow, broad)
    # Read as a name, the narrow pattern stands for all it matches, if only `*` of the broad can take its wild parts.
    return "?" not in broad and "[" not in broad and "[" not in narrow and fnmatchcase(narrow, broad)


SHOWN_MAX: Final = 20  # sentences of one kind; a generated policy may have thousands
_WHOM: Final = ("namespace", "pod", "container", "runtime_handler", "labels", "qos")


def unreachable_rules(policy: Policy) -> Iterator[Finding]:
    """Yield the rules that an earlier rule leaves nothing to decide."""
    rules = policy.rule
    found = [
        in_policy(
            f"{rules.called(index)} can never decide: {rules.called(before)} before it matches all that it matches",
            f"rule[{index}]",
        )
        for index, before in shadowed(rules.rules)
    ]
    yield from found[:SHOWN_MAX]
    if len(found) > SHOWN_MAX:
        yield in_policy(f"{counted(len(found) - SHOWN_MAX, 'more rule')} can never decide")


def namespaces_behind_rules(policy: Policy) -> Iterator[Finding]:
    """Yield the lists of namespaces that no container ever comes to."""
    index = catch_all(policy)
    if index is not None:
        yield in_policy(
            f"{policy.rule.called(index)} matches all, so namespaces.allow and namespaces.deny change nothing",
            "namespaces.allow",
        )


def catch_all(policy: Policy) -> int | None:
    """Return the index of the first rule that matches every container, or None."""
    each = enumerate(policy.rule.rules)
    return next((index for index, rule in each if all(getattr(rule, key) is None for key in _WHOM)), None)


def rule_terms(policy: Policy) -> Iterator[Finding]:
    """Compare what rules allow with what requests get that do not say."""
    found = [finding for index in range(len(policy.rule.rules)) for finding in _terms_of(policy, index)]
    yield from found[:SHOWN_MAX]
    yield from _lonely(policy.capabilities.allowed, "capabilities.allowed")
    if policy.defaults.mode not in policy.modes.allowed:
        yield in_policy(
            f"defaults.mode is {policy.defaults.mode}, which modes.allowed does not list: requests that do not say are "
            "refused",
            "defaults.mode",
        )
    if denied := sorted(policy.defaults.extras - policy.extras.allowed):
        yield in_policy(
            f"defaults.extras gives {', '.join(denied)}, which extras.allowed does not list: requests that name no "
            "extras are refused",
            "defaults.extras",
        )


def _terms_of(policy: Policy, index: int) -> Iterator[Finding]:
    rule, path = policy.rule.rules[index], f"rule[{index}]"
    if not rule.allow:
        return
    terms = Terms(policy=policy, rule=rule, path=path)
    for default, allowed, denied in (
        (rule.default_mode, rule.modes, terms.denied_mode(terms.mode)),
        (rule.default_capabilities, rule.capabilities, terms.denied_capabilities(closure(terms.capabilities))),
        (rule.default_extras, rule.extras, terms.denied_extras(terms.extras.asked)),
    ):
        if denied and not (default is None and allowed is None):
            yield in_policy(f"{path}: its own default is refused: {denied.what}", path)
    if rule.capabilities is not None:
        yield from _lonely(rule.capabilities, f"{path}.capabilities")
    if rule.runtime_handler and _globs_cover(policy.runtimes.refuse, rule.runtime_handler):
        yield in_policy(
            f"{path} allows only runtime handlers that runtimes.refuse refuses: no container gets a GPU by it; change "
            "one of the two",
            path,
        )
    if rule.labels and rule.namespace is None:
        yield in_policy(
            f"{path} allows by labels alone, in any namespace: the creator of a pod writes its labels; name the "
            "namespaces too",
            path,
        )


def _lonely(allowed: Capabilities, path: str) -> Iterator[Finding]:
    for each in Capability:
        lacking = closure(frozenset({each})) - allowed
        if each in allowed and lacking:
            yield in_policy(
                f"{path} lists {each}, never allowed: it brings {', '.join(sorted(lacking))}, not listed there",
                path,
            )


def pools_among_themselves(policy: Policy) -> Iterator[Finding]:
    """Yield pools whose GPUs no container may have, or containers of more namespaces than the pools are kept for."""
    named = {name for rule in policy.rule.rules if rule.pool for name in rule.pool.patterns}
    for index, pool in enumerate(policy.pool.pools):
        given = {"kubelet": policy.kubelet.enabled} if pool.name in policy.kubelet.pools else {}
        given |= {"dra": policy.dra.enabled} if pool.name == policy.dra.pool else {}
        if policy.dra.enabled and policy.dra.pool in ("", pool.name) and _is_for_some(pool):
            yield in_policy(
                f'pool[{index}] "{pool.name}" is kept for some namespaces, but ResourceClaims of every namespace get '
                "its GPUs, too: set dra.pool to another pool",
                "dra.pool",
            )
        offered = policy.kubelet.enabled and policy.kubelet.resource_of(pool.name)
        if (
            offered
            or (policy.dra.enabled and not policy.dra.pool)
            or pool.name in named
            or (pool.namespaces and pool.namespaces.patterns)
            or any(given.values())
        ):
            continue
        if given:
            section = next(iter(given))
            key = "kubelet.resources" if section == "kubelet" and policy.kubelet.resources else f"{section}.pool"
            yield in_policy(
                f'pool[{index}] "{pool.name}" is that of {key}, but {section}.enabled is not set: its GPUs '
                f"are granted only where `nri-gpu run` has --{section}",
                key,
            )
        else:
            yield in_policy(
                f'pool[{index}] "{pool.name}" is unused: it has no namespaces, and no rule names it, so its GPUs '
                "are granted to no container",
                f"pool[{index}]",
            )


def _is_for_some(pool: Pool) -> bool:
    patterns = pool.namespaces.patterns if pool.namespaces else ()
    return bool(patterns) and not any(pattern_covers(each, "*") for each in patterns)


def other_settings(policy: Policy) -> Iterator[Finding]:
    """Advise on requests by environment, privileged containers, stale inventories."""
    environment, inventory = policy.environment, policy.inventory
    if environment.may_ask.patterns:
        yield in_policy(
            "environment.may_ask makes every image with NVIDIA_VISIBLE_DEVICES ask for GPUs in these namespaces: not "
            "on nodes with NVIDIA's device plugin",
            "environment.may_ask",
        )
    elif environment.may_ask_all:
        yield in_policy(
            "environment.may_ask_all changes nothing: environment.may_ask lists no namespace", "environment.may_ask_all"
        )
    if environment.may_ask_all and any(pattern_covers(each, "*") for each in environment.may_ask.patterns):
        yield in_policy(
            "environment.may_ask_all with every namespace: each container of a CUDA image takes every free GPU",
            "environment.may_ask_all",
        )
    if inventory.stale is Stale.REFUSE and inventory.stale_after_s <= inventory.refresh_s:
        yield in_policy(
            f"inventory.stale_after_s = {inventory.stale_after_s} is not above inventory.refresh_s = "
            f"{inventory.refresh_s}: requests are refused between two queries although nothing is wrong",
            "inventory.stale_after_s",
        )
    if policy.privileged.action is PrivilegedAction.DENY:
        yield in_policy(
            'privileged.action = "deny" refuses requests alone: a privileged container that asks for nothing can still '
            "use every GPU; keep these out by an admission policy",
            "privileged.action",
        )


def advise_for(policy: Policy, inventory: Inventory) -> tuple[Finding, ...]:
    """Advise on a node with these GPUs: pools that have none of them, limits above their number."""
    members = policy.pool.members(inventory)
    used = {pool.name for pool in members.values()}
    resources = {pool: resource for resource, pool in policy.kubelet.resources}
    units = len([unit for gpu in inventory.gpus for unit in (gpu.parts if gpu.mig_enabled else (gpu,))])
    has = f"this node has {counted(units, 'GPU')} (a MIG device counts as one)"
    found = [
        in_policy(
            f'pool[{index}] "{pool.name}" has no GPU of this node: {_why_empty(policy, index, inventory)}'
            + (f"; {resources[pool.name]} is offered without devices" if pool.name in resources else ""),
            f"pool[{index}]",
        )
        for index, pool in enumerate(policy.pool.pools)
        if pool.name not in used
    ]
    found += [
        in_policy(f"limits.{key} = {getattr(policy.limits, key)} can never bind: {has}", f"limits.{key}")
        for key in LIMIT_KEYS
        if key != "containers_per_gpu" and units <= getattr(policy.limits, key) < UNLIMITED
    ]
    return tuple(found)


def _why_empty(policy: Policy, index: int, inventory: Inventory) -> str:
    pool, earlier = policy.pool.pools[index], policy.pool.members(inventory)
    taken = {earlier[unit.uuid].name for unit in inventory.units if pool.has(unit) and unit.uuid in earlier}
    return f"those that fit are in pool {', '.join(sorted(taken))} before it" if taken else "its selectors fit none"
