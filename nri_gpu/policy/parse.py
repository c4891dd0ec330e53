"""Reading a policy file: every fault of every key, then the faults between keys, rules and pools.

The second are checked only where each key is valid. A key without effect where it stands is a fault and not advice,
since its author expects an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.text import quoted
from nri_gpu.policy.health import health_faults
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from nri_gpu.policy.lines import line_of
from nri_gpu.policy.model import Policy
from nri_gpu.policy.pools import SELECTORS, Pool, PoolList
from nri_gpu.policy.rules import Rule, RuleList
from nri_gpu.policy.schema import BY_PATH, LISTS, SCHEMA_VERSION, SECTIONS, SETTINGS
from nri_gpu.policy.text import known_words, shown_key, toml_type

_OF_ALLOW: Final = (
    *("default_mode", "modes", "default_capabilities", "capabilities", "default_extras", "extras", "pool", "limits"),
)
COMMAND_LINE: Final = "command line"  # stands where a fault names its file


def parse_policy(raw: Mapping[str, object], file: str, lines: Mapping[str, int] | None = None) -> Policy:
    """The policy a file describes; keys it does not have keep their defaults.

    lines: key path -> 1-based line, as far as known.

    Raises:
        PolicyError: with every fault, in the order of the file.

    """
    where = lines or {}
    found = list(_faults(raw))
    tables: Mapping[str, Any] = raw
    lists = {} if found else {name: kind.convert(tables.get(name, [])) for name, kind in LISTS.items()}
    if lists:
        found += cross_faults(lists["rule"], lists["pool"])
        found += kubelet_faults(tables.get("kubelet", {}).get("pool", ""), lists["pool"])
    if not found:
        policy = _with(Policy.default(), {path: BY_PATH[path].kind.convert(value) for path, value in _leaves(raw)})
        found += health_faults(policy.health)
        found += external_faults(policy.kubelet)
    if found:
        faults = [Fault(file, path, message, line_of(where, path)) for path, message in found]
        raise PolicyError(tuple(sorted(faults, key=lambda fault: fault.line or 0)))
    return replace(policy, rule=RuleList(lists["rule"]), pool=PoolList(lists["pool"]), source=file)


def override(policy: Policy, overrides: Mapping[str, object]) -> Policy:
    """The policy with settings from the command line put over it.

    overrides: key path -> raw value; None stands for an option that was not given.

    Raises:
        PolicyError: each fault under the option's own name.

    """
    given = {path: raw for path, raw in overrides.items() if raw is not None}
    found = [
        Fault(COMMAND_LINE, BY_PATH[path].flag or path, message)
        for path, raw in given.items()
        for _, message in BY_PATH[path].kind.faults(raw)
    ]
    if found:
        raise PolicyError(tuple(found))
    return _with(policy, {path: BY_PATH[path].kind.convert(raw) for path, raw in given.items()})


def _faults(raw: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each thing wrong."""
    yield from _schema_faults(raw.get("schema", SCHEMA_VERSION))
    for name, section in raw.items():
        if name == "schema":
            continue
        if name in LISTS:
            yield from ((name + inner, message) for inner, message in LISTS[name].faults(section))
        elif name not in SECTIONS:
            yield shown_key(name), f"unknown {_what(section)}{_known_at_top(name)}"
        elif not isinstance(section, Mapping):
            yield name, f"must be a table, [{name}], not {toml_type(section)}"
        else:
            yield from _section_faults(name, section)


def _schema_faults(version: object) -> Iterator[tuple[str, str]]:
    if isinstance(version, bool) or not isinstance(version, int):
        yield "schema", f"must be {SCHEMA_VERSION}, not {toml_type(version)}"
    elif version != SCHEMA_VERSION:
        yield "schema", f"must be {SCHEMA_VERSION}, the only version this nri-gpu reads"


def _section_faults(section: str, raw: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in raw.items():
        path = f"{section}.{key}"
        if path in BY_PATH:
            yield from ((path + inner, message) for inner, message in BY_PATH[path].kind.faults(value))
        else:
            known = known_words(key, (setting.key for setting in SETTINGS if setting.section == section))
            yield f"{section}.{shown_key(key)}", f"unknown key{_elsewhere(key) or known}"


def _known_at_top(name: str) -> str:
    return _elsewhere(name) or known_words(name, ("schema", *SECTIONS, *LISTS))


def _elsewhere(key: str) -> str:
    """Where a key stands under the wrong heading."""
    homes = [setting.section for setting in SETTINGS if setting.key == key]
    return f"; it belongs under [{homes[0]}]" if homes else ""


def _what(raw: object) -> str:
    return "section" if isinstance(raw, Mapping | list) else "key"


def _leaves(raw: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for section, values in raw.items():
        if isinstance(values, Mapping):
            yield from ((f"{section}.{key}", value) for key, value in values.items())


def _with(policy: Policy, values: Mapping[str, Any]) -> Policy:
    """A policy with some settings changed, by key path."""
    changed: dict[str, Any] = {}
    for section in _sections_of(values):
        keys = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(section + ".")}
        changed[section] = replace(getattr(policy, section), **keys)
    return replace(policy, **changed)


def _sections_of(paths: Iterable[str]) -> list[str]:
    return sorted({path.partition(".")[0] for path in paths})


def cross_faults(rules: tuple[Rule, ...], pools: tuple[Pool, ...]) -> Iterator[tuple[str, str]]:
    """Faults between keys, rules and pools: key path and sentence of each."""
    yield from _same_names("pool", [pool.name for pool in pools])
    yield from _same_names("rule", [rule.name for rule in rules])
    names = {pool.name: None for pool in pools}
    for index, rule in enumerate(rules):
        yield from ((f"rule[{index}]{key}", message) for key, message in _rule_faults(rule, names))
    for index, pool in enumerate(pools):
        yield from ((f"pool[{index}]{key}", message) for key, message in _pool_faults(pool))


def kubelet_faults(name: str, pools: tuple[Pool, ...]) -> Iterator[tuple[str, str]]:
    """Faults of the pool that is offered to the kubelet."""
    names = {pool.name: None for pool in pools}
    if name and name not in names:
        known = known_words(name, names) if pools else ", for there is no [[pool]]"
        yield "kubelet.pool", f"no pool is called {quoted(name)}{known}"


def external_faults(settings: KubeletSettings) -> Iterator[tuple[str, str]]:
    """Of other components' resources, where nri-gpu offers some itself."""
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
        yield "", f"has no selector: give at least one of {', '.join(SELECTORS)}"
    low, high = pool.memory_at_least, pool.memory_at_most
    if low is not None and high is not None and low > high:
        yield ".memory_at_most", "is less than memory_at_least"
