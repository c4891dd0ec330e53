"""The reading of a policy file: every fault of every key, then the faults between keys, rules and pools.

The second are checked only if each key is valid, on what holds: the file with the command line's options over it. A key
without effect where it stands is a fault and not advice, since its author expects an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Final, TypeVar

from msgspec import UNSET, Struct, convert
from msgspec.inspect import Type, type_info
from msgspec.structs import replace

from nri_gpu.domain.errors import COMMAND_LINE, Fault, PolicyError
from nri_gpu.domain.finding import Finding, in_policy
from nri_gpu.domain.text import quoted
from nri_gpu.policy.document import LISTS, SECTIONS, faults, file_type, known_words, setting, shown_key
from nri_gpu.policy.dra_settings import dra_faults
from nri_gpu.policy.dropped import without_dropped
from nri_gpu.policy.forms import given, settings_of
from nri_gpu.policy.health_settings import health_faults
from nri_gpu.policy.kubelet_settings import MIG, KubeletSettings, MigStrategy, mig_resource
from nri_gpu.policy.lines import line_of
from nri_gpu.policy.metrics_settings import metrics_faults
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import SELECTORS, Pool, PoolList, Rule, RuleList

_OF_ALLOW: Final = (
    *("default_mode", "modes", "default_capabilities", "capabilities", "default_extras", "extras", "pool", "limits"),
)
S = TypeVar("S", bound=Struct)


def parse_policy(
    raw: Mapping[str, object],
    file: str,
    lines: Mapping[str, int] | None = None,
    options: Mapping[str, object] | None = None,
    *,
    all_options: bool = True,
) -> Policy:
    """Return the policy a file describes, with options over it; keys that neither has keep their defaults.

    lines: key path -> 1-based line, as far as known. options: as `override` takes them. all_options: whether these are
    all that `run` has; if not, what others could mend is no fault.

    Raises: PolicyError: with every fault, those of the file in its order, then those that options make.
    """
    where = lines or {}
    dropped: dict[str, str] = {}
    known = without_dropped(raw, dropped)
    # A daemon without a file starts sooner if it need not know how a file looks.
    of_keys = faults(_file_info(), known) if known else ()
    found = [Fault(file, path, message, line_of(where, path)) for path, message in of_keys]
    wrong = tuple(option_faults(options or {}))
    if not (found or wrong):
        written = _read(convert(known, file_type()), file) if known else replace(Policy.default(), source=file)
        policy = override(written, options or {})
        for path, message, deciding in _cross_faults(policy):
            flags = [setting(key).flag for key in deciding if _value_at(policy, key) != _value_at(written, key)]
            if flags:
                wrong += (Fault(COMMAND_LINE, ", ".join(flags), message),)
            elif all_options or not deciding:
                found.append(Fault(file, path, message, line_of(where, path)))
    if found or wrong:
        raise PolicyError((*sorted(found, key=lambda fault: fault.line or 0), *wrong))
    tables = known.items() if isinstance(known, dict) else ()
    return replace(
        policy,
        ignored=tuple(_ignored(dropped, where)),
        empty_tables=_empty_tables(raw, file, where),
        written=frozenset(f"{name}.{key}" for name, table in tables if isinstance(table, dict) for key in table),
    )


def option_faults(options: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the faults of options one by one, each under its own name. A daemon of another version may have others."""
    for path, raw in _given(options).items():
        try:
            known = setting(path)
        except KeyError:
            yield Fault(COMMAND_LINE, path, "is no setting of this nri-gpu: use the daemon's version here, too")
        else:
            yield from (Fault(COMMAND_LINE, known.flag or path, said) for _, said in faults(type_info(known.type), raw))


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {path: raw for path, raw in options.items() if raw is not None}


def _value_at(policy: Policy, path: str) -> object:
    section, _, key = path.partition(".")
    return getattr(getattr(policy, section), key)


def _ignored(dropped: Mapping[str, str], lines: Mapping[str, int]) -> Iterator[Finding]:
    for path, why in dropped.items():
        line = line_of(lines, path)
        yield in_policy(f"{path}{f', line {line},' if line else ''} is ignored: {why}; remove it", path)


def _empty_tables(raw: Mapping[str, object], file: str, lines: Mapping[str, int]) -> tuple[Fault, ...]:
    """Return a fault for each table without a key: what stood in it may have been cut off, and every default holds."""
    message = "has no key, so each has its default: give it one, or remove its heading"
    return tuple(Fault(file, path, message, line_of(lines, path)) for path in _empty(raw, ""))


def _empty(value: object, path: str) -> Iterator[str]:
    if value == {} and path and not _may_be_empty(path):
        yield path
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _empty(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _empty(each, f"{path}[{index}]")


def _may_be_empty(path: str) -> bool:
    section, _, key = path.partition(".")
    return section in SECTIONS and key in settings_of(SECTIONS[section]) and setting(path).written_default == {}


@cache  # describing the type takes longer than checking a file by it
def _file_info() -> Type:
    return type_info(file_type())


def _read(table: Struct, file: str) -> Policy:
    """Return the policy of a file whose keys are valid one by one."""
    tables = {name: each for name in (*SECTIONS, *LISTS) if (each := getattr(table, name)) is not UNSET}
    sections = {name: _value(cls, tables[name]) for name, cls in SECTIONS.items() if name in tables}
    rules = RuleList(tuple(_value(Rule, each) for each in tables.get("rule", ())))
    pools = PoolList(tuple(_value(Pool, each) for each in tables.get("pool", ())))
    return replace(Policy.default(), **sections, rule=rules, pool=pools, source=file)


def _value(cls: type[S], table: Struct) -> S:
    return cls(**given(cls, table))


def override(policy: Policy, options: Mapping[str, object]) -> Policy:
    """Put settings from the command line over the policy. Faults between keys are not looked for.

    options: key path -> raw value; None stands for an option that was not given.

    Raises: PolicyError: each fault under the option's own name.
    """
    if found := tuple(option_faults(options)):
        raise PolicyError(found)
    for path, raw in _given(options).items():
        section, _, key = path.partition(".")
        changed = replace(getattr(policy, section), **{key: setting(path).read(raw)})
        policy = replace(policy, **{section: changed})
    return policy


def _cross_faults(policy: Policy) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the faults between keys, rules and pools: key path, sentence, and keys by which an option can make it."""
    names = [pool.name for pool in policy.pool.pools]
    of_file = (
        _same_names("pool", names),
        _same_names("rule", [rule.name for rule in policy.rule.rules]),
        _faults_in("rule", (_rule_faults(rule, names) for rule in policy.rule.rules)),
        _faults_in("pool", map(_pool_faults, policy.pool.pools)),
        _unknown_pool("kubelet.pool", policy.kubelet.pool, names),
        _resource_faults(policy.kubelet, names),
        _unknown_pool("dra.pool", policy.dra.pool, names),
        health_faults(policy.health),
    )
    yield from ((path, message, ()) for path, message in chain.from_iterable(of_file))
    yield from ((*each, ("metrics.listen",)) for each in metrics_faults(policy.metrics))
    yield from ((*each, ("dra.enabled", "kubelet.enabled")) for each in dra_faults(policy.dra, policy.kubelet))
    yield from ((*each, ("kubelet.enabled",)) for each in _external_faults(policy.kubelet))


def _faults_in(table: str, found: Iterable[Iterable[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield the faults of an array of tables. found: of each table, in order."""
    for index, each in enumerate(found):
        yield from ((f"{table}[{index}]{key}", message) for key, message in each)


def _resource_faults(settings: KubeletSettings, pools: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of `kubelet.resources`: a pool has one resource, and each resource is one plugin's."""
    if settings.resources and settings.pool:
        yield "kubelet.pool", "goes without kubelet.resources: list kubelet.resource there, with this pool"
    first: dict[str, str] = {}
    for resource, pool in settings.resources:
        path = f"kubelet.resources.{shown_key(resource)}"
        yield from _unknown_pool(path, pool, pools)
        if first.setdefault(pool, resource) != resource:
            yield (
                path,
                f"pool {quoted(pool)} is that of {first[pool]} already: the scheduler would count its GPUs twice",
            )
        if settings.mig_strategy is MigStrategy.MIXED and resource.partition("/")[2].startswith(MIG):
            yield path, f"names that begin with {MIG} are those of MIG profiles, as kubelet.mig_strategy is mixed"


def _external_faults(settings: KubeletSettings) -> Iterator[tuple[str, str]]:
    """Yield the faults of other components' resources if nri-gpu offers some itself."""
    if not settings.enabled:
        return
    mixed = settings.mig_strategy is MigStrategy.MIXED
    samples = [mig_resource(name, "1g.10gb") for name in settings.names] if mixed else []
    for own in dict.fromkeys((*settings.names, *samples)):
        name = own + settings.suffix
        index = settings.inject_for.first(name)
        if index is not None:
            pattern = quoted(settings.inject_for.patterns[index])
            yield (
                f"kubelet.inject_for[{index}]",
                f"{pattern} in kubelet.inject_for takes {name}, which nri-gpu offers to the kubelet itself: another "
                "device plugin's resource needs another name, so set kubelet.resource, or leave nri-gpu's device "
                "plugin off",
            )


def _same_names(table: str, names: list[str]) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name and first.setdefault(name, index) != index:
            yield f"{table}[{index}].name", f"{quoted(name)} is the name of {table}[{first[name]}] already"


def _rule_faults(rule: Rule, pools: list[str]) -> Iterator[tuple[str, str]]:
    if rule.allow and rule.otherwise is not None:
        yield ".otherwise", "goes with allow = false only"
    if not rule.allow:
        useless = (key for key in _OF_ALLOW if getattr(rule, key) is not None)
        yield from ((f".{key}", "goes with allow = true only") for key in useless)
    for index, name in enumerate(rule.pool.patterns if rule.pool else ()):
        yield from _unknown_pool(f".pool[{index}]", name, pools)


def _unknown_pool(key: str, name: str, pools: list[str]) -> Iterator[tuple[str, str]]:
    if name and name not in pools:
        known = known_words(name, pools) if pools else ", for there is no [[pool]]"
        yield key, f"no pool is called {quoted(name)}{known}"


def _pool_faults(pool: Pool) -> Iterator[tuple[str, str]]:
    if all(getattr(pool, key) is None for key in SELECTORS):
        yield "", f"has no selector: give at least one of {', '.join(SELECTORS)}"
    low, high = pool.memory_at_least, pool.memory_at_most
    if low is not None and high is not None and low > high:
        yield ".memory_at_most", "is less than memory_at_least"
