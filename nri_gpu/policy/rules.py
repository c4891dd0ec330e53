"""`[[rule]]`: who is meant, and what they may have. Matched in order, the first that matches decides.

A policy may have thousands, and a container must not wait for them. Rules that name their namespaces, or the value of
a label, are looked up by that; of the rest, one regular expression over many says whether any of them is worth a look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.policy.globs import Globs, is_literal
from nri_gpu.policy.kinds import Choice, Choices, Declaration, Flag, Text
from nri_gpu.policy.limits import Limits
from nri_gpu.policy.records import Partial
from nri_gpu.policy.shorthands import LabelPatterns, PatternOrMore, WordOrMore
from nri_gpu.policy.words import POOL_NAMES, Otherwise

RULES_MAX: Final = 8192
BLOCK: Final = 32  # rules behind one regular expression

_NAMES: Final = PatternOrMore(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))
_LABELS: Final = LabelPatterns(
    # Kubernetes: a prefix of at most 253 characters, a slash, a name of at most 63.
    Text(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9_.-]+", "a label's key, such as app.kubernetes.io/name", 317),
    Text(r"[!-~]*", "a pattern of printable ASCII without blanks", 63),
)
_NAME: Final = Text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_REASON: Final = Text(r"[ -~]+", "printable ASCII on one line", 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who is meant (all keys that are there must match), and what they may have."""

    allow: Annotated[bool, Declaration(Flag(), "Whether they may have GPUs: true or false.")]
    name: Annotated[str, Declaration(_NAME, "What sentences and the log call this rule.")] = ""
    namespace: Annotated[Globs | None, Declaration(_NAMES, "Patterns of the pod's namespace.")] = None
    pod: Annotated[Globs | None, Declaration(_NAMES, "Patterns of the pod's name.")] = None
    container: Annotated[Globs | None, Declaration(_NAMES, "Patterns of the container's name.")] = None
    runtime_handler: Annotated[
        Globs | None, Declaration(_NAMES, "Patterns of the runtime handler, which a RuntimeClass names.")
    ] = None
    labels: Annotated[
        tuple[tuple[str, Globs], ...] | None,
        Declaration(_LABELS, "Labels of the pod, each with a pattern of its value; whoever makes the pod writes them."),
    ] = None
    qos: Annotated[
        frozenset[Qos] | None,
        Declaration(WordOrMore(Qos), "The pod's service class, derived from its cgroup; pods of no kubelet have none."),
    ] = None
    reason: Annotated[str, Declaration(_REASON, "Why; a refusal says it.")] = ""
    otherwise: Annotated[
        Otherwise | None,
        Declaration(Choice(Otherwise), "With allow = false: refuse the container, or start it without GPUs."),
    ] = None
    default_mode: Annotated[Mode | None, Declaration(Choice(Mode), "In place of defaults.mode.")] = None
    modes: Annotated[
        frozenset[Mode] | None, Declaration(Choices(Mode), "Modes to ask for, in place of modes.allowed.")
    ] = None
    default_capabilities: Annotated[
        Capabilities | None, Declaration(Choices(Capability), "In place of defaults.capabilities.")
    ] = None
    capabilities: Annotated[
        Capabilities | None,
        Declaration(Choices(Capability), "Parts of the driver to ask for, in place of capabilities.allowed."),
    ] = None
    pool: Annotated[
        Globs | None, Declaration(PatternOrMore(POOL_NAMES), "Names of the pools they get GPUs from, and no others.")
    ] = None
    limits: Annotated[
        tuple[tuple[str, Any], ...] | None, Declaration(Partial(Limits), "Limits in place of those in [limits].")
    ] = None

    def matches(self, of: Container) -> bool:
        """Whether it is about a container."""
        pod = of.pod
        return (
            _takes(self.namespace, pod.namespace)
            and _takes(self.pod, pod.name)
            and _takes(self.container, of.name)
            and _takes(self.runtime_handler, pod.runtime_handler)
            and (self.qos is None or pod.qos in self.qos)
            and (self.labels is None or all(_takes(globs, pod.labels.get(key)) for key, globs in self.labels))
        )

    @property
    def named_patterns(self) -> tuple[Globs | None, ...]:
        """Of the names that `Rules` looks at all at once, in its order."""
        return (self.namespace, self.pod, self.container, self.runtime_handler)


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, in the operator's order."""

    rules: tuple[Rule, ...] = ()
    _blocks: dict[object, tuple[Block, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        homes: dict[object, list[int]] = {}
        for index, rule in enumerate(self.rules):
            for home in _homes(rule):
                homes.setdefault(home, []).append(index)
        blocks = {home: tuple(_blocks(indices, self.rules)) for home, indices in homes.items()}
        object.__setattr__(self, "_blocks", blocks)

    def first(self, of: Container) -> int | None:
        """Index of the first rule that is about a container, None where none is."""
        if not self.rules:
            return None
        pod = of.pod
        names = _subject((pod.namespace, pod.name, of.name, pod.runtime_handler))
        homes = (None, pod.namespace, *pod.labels.items())
        found = (self._first_in(block, names, of) for home in homes for block in (self._blocks.get(home),) if block)
        return min((index for index in found if index is not None), default=None)

    def _first_in(self, blocks: tuple[Block, ...], names: str, of: Container) -> int | None:
        for block in blocks:
            if block.may_match is None or block.may_match.match(names):
                for index in block.indices:
                    if self.rules[index].matches(of):
                        return index
        return None


@dataclass(frozen=True, slots=True)
class Block:
    """Some rules, in order. may_match: over all names, true wherever one of the rules matches; None where few."""

    indices: tuple[int, ...]
    may_match: re.Pattern[str] | None


NO_RULES: Final = Rules()

_SEPARATOR: Final = "\0"  # in no name; where a hostile one has it, it is taken out
_ANY: Final = f"[^{_SEPARATOR}]*"


def _homes(rule: Rule) -> Iterator[object]:
    """Under which keys a rule is looked up: its namespaces, the value of one of its labels, or None with the rest."""
    if rule.namespace is not None and all(map(is_literal, rule.namespace.patterns)):
        yield from rule.namespace.patterns
        return
    for key, globs in rule.labels or ():
        if is_literal(globs.patterns[0]):
            yield key, globs.patterns[0]
            return
    yield None


def _blocks(indices: Sequence[int], rules: tuple[Rule, ...]) -> Iterator[Block]:
    if len(indices) <= BLOCK:
        yield Block(tuple(indices), None)
        return
    for start in range(0, len(indices), BLOCK):
        some = tuple(indices[start : start + BLOCK])
        yield Block(some, re.compile("|".join(dict.fromkeys(_loosely(rules[index]) for index in some)), re.DOTALL))


def _subject(names: Sequence[str]) -> str:
    return "".join(name.replace(_SEPARATOR, "") + _SEPARATOR for name in names)


def _loosely(rule: Rule) -> str:
    """An expression that matches whatever the rule does, and more: beginnings and ends of its patterns alone."""
    return "".join(_field(globs) + _SEPARATOR for globs in rule.named_patterns)


def _field(globs: Globs | None) -> str:
    if globs is None:
        return _ANY
    return f"(?:{'|'.join(_ends(pattern) for pattern in globs.patterns)})"


def _ends(pattern: str) -> str:
    if is_literal(pattern):
        return re.escape(pattern)
    first = min(at for at in map(pattern.find, "*?[") if at >= 0)
    last = max(map(pattern.rfind, "*?]"))
    # A bracket that is never closed stands for itself: nothing is known of what follows.
    end = pattern[last + 1 :] if last >= first else ""
    return re.escape(pattern[:first]) + _ANY + re.escape(end)


def _takes(globs: Globs | None, name: str | None) -> bool:
    return globs is None or (name is not None and globs.first(name) is not None)
