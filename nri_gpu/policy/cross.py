"""Faults between the keys of a rule or a pool, and between rules and pools: what no key shows by itself.

Asked only where each key is good by itself. A key that could do nothing where it stands is a fault, not advice: whoever
wrote it thinks that it does something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from nri_gpu.policy.pools import SELECTORS, Pool
from nri_gpu.policy.rules import Rule
from nri_gpu.policy.text import known_words, quoted

_OF_ALLOW: Final = (
    *("default_mode", "modes", "default_capabilities", "capabilities", "default_extras", "extras", "pool", "limits"),
)


def cross_faults(rules: tuple[Rule, ...], pools: tuple[Pool, ...]) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each."""
    yield from _same_names("pool", [pool.name for pool in pools])
    yield from _same_names("rule", [rule.name for rule in rules])
    names = {pool.name: None for pool in pools}
    for index, rule in enumerate(rules):
        yield from ((f"rule[{index}]{key}", message) for key, message in _rule_faults(rule, names))
    for index, pool in enumerate(pools):
        yield from ((f"pool[{index}]{key}", message) for key, message in _pool_faults(pool))


def kubelet_faults(name: str, pools: tuple[Pool, ...]) -> Iterator[tuple[str, str]]:
    """Of the pool that the kubelet is offered."""
    names = {pool.name: None for pool in pools}
    if name and name not in names:
        known = known_words(name, names) if pools else ", for there is no [[pool]]"
        yield "kubelet.pool", f"no pool is called {quoted(name)}{known}"


def beside_faults(settings: KubeletSettings) -> Iterator[tuple[str, str]]:
    """Of resources that others offer, where nri-gpu offers some itself."""
    if not settings.enabled:
        return
    sample = f"{settings.resource.partition('/')[0]}/mig-1g.10gb" if settings.mig_strategy is MigStrategy.MIXED else ""
    for own in filter(None, (settings.resource, sample)):
        name = f"{own}.shared" if settings.replicas > 1 and settings.rename else own
        index = settings.inject_for.first(name)
        if index is not None:
            pattern = quoted(settings.inject_for.patterns[index])
            yield (
                f"kubelet.inject_for[{index}]",
                f"{pattern} takes {name}, which nri-gpu offers to the kubelet itself: what others offer needs another "
                "name, so set kubelet.resource, or leave the device plugin off",
            )


def _same_names(table: str, names: list[str]) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name and first.setdefault(name, index) != index:
            yield f"{table}[{index}].name", f"{quoted(name)} is the name of {table}[{first[name]}] already"


def _rule_faults(rule: Rule, pools: Mapping[str, None]) -> Iterator[tuple[str, str]]:
    if rule.allow and rule.otherwise is not None:
        yield ".otherwise", "goes with allow = false only"
    if not rule.allow:
        useless = (key for key in _OF_ALLOW if getattr(rule, key) is not None)
        yield from ((f".{key}", "goes with allow = true only") for key in useless)
    for index, name in enumerate(rule.pool.patterns if rule.pool else ()):
        if name not in pools:
            known = known_words(name, pools) if pools else ", for there is no [[pool]]"
            yield f".pool[{index}]", f"no pool is called {quoted(name)}{known}"


def _pool_faults(pool: Pool) -> Iterator[tuple[str, str]]:
    if all(getattr(pool, key) is None for key in SELECTORS):
        yield "", f"says not which GPUs: give at least one of {', '.join(SELECTORS)}"
    low, high = pool.memory_at_least, pool.memory_at_most
    if low is not None and high is not None and low > high:
        yield ".memory_at_most", "is less than memory_at_least"
