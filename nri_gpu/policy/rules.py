"""`[[rule]]`: who is meant, and what they may have. Matched in order, the first that matches decides.

A policy may have thousands, and a container must not wait for them: `Index` says which few are worth a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Struct, field
from msgspec.structs import force_setattr

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.domain.value import Value
from nri_gpu.policy.compound_kinds import LabelPatterns, Partial, PatternOrMore, WordOrMore
from nri_gpu.policy.globs import Globs, Index
from nri_gpu.policy.kinds import POOL_NAMES, Choice, Choices, Declaration, Flag, Otherwise, Text
from nri_gpu.policy.limits import Limits

RULES_MAX: Final = 8192

_NAMES: Final = PatternOrMore(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))
_LABELS: Final = LabelPatterns(
    # Kubernetes: a prefix of at most 253 characters, a slash, a name of at most 63.
    Text(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9_.-]+", "a label's key, such as app.kubernetes.io/name", 317),
    Text(r"[!-~]*", "a pattern of printable ASCII without blanks", 63),
)
_DEFAULT_EXTRAS: Final = Choices(Extra, minimum=0, but=frozenset({Extra.IMEX}))
_NAME: Final = Text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_REASON: Final = Text(r"[ -~]+", "printable ASCII on one line", 200)


class Rule(Struct, frozen=True, kw_only=True):
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
    default_extras: Annotated[frozenset[Extra] | None, Declaration(_DEFAULT_EXTRAS, "In place of defaults.extras.")] = (
        None
    )
    extras: Annotated[
        frozenset[Extra] | None,
        Declaration(Choices(Extra, minimum=0), "Extras to ask for, in place of extras.allowed."),
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
    def anchors(self) -> Mapping[str, Globs]:
        """Patterns by the name that they are about, for the index."""
        names = {key: getattr(self, key) for key in ("namespace", "pod", "container", "runtime_handler")}
        labels = {f"label {key}": globs for key, globs in self.labels or ()}
        return {key: globs for key, globs in {**names, **labels}.items() if globs is not None}


class RuleList(Value, frozen=True):
    """All rules, in the operator's order."""

    aside: ClassVar = ("_index",)

    rules: tuple[Rule, ...] = ()
    _index: Index = field(default_factory=Index)

    def __post_init__(self) -> None:
        force_setattr(self, "_index", Index.of([rule.anchors for rule in self.rules]))

    def first(self, of: Container) -> int | None:
        """Index of the first rule that is about a container, None where none is."""
        if not self.rules:
            return None
        pod = of.pod
        names = {"namespace": pod.namespace, "pod": pod.name, "container": of.name}
        names |= {"runtime_handler": pod.runtime_handler, **{f"label {key}": each for key, each in pod.labels.items()}}
        found = (self._first_of(some, of) for some in self._index.candidates(names))
        return min((index for index in found if index is not None), default=None)

    def _first_of(self, indices: tuple[int, ...], of: Container) -> int | None:
        return next((index for index in indices if self.rules[index].matches(of)), None)


NO_RULES: Final = RuleList()


def _takes(globs: Globs | None, name: str | None) -> bool:
    return globs is None or (name is not None and globs.first(name) is not None)
