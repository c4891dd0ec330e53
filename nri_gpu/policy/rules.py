"""`[[rule]]`: which containers a rule matches, and what they may have. The first rule that matches decides."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Struct

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.policy.compound_kinds import LabelPatterns, Partial, PatternOrMore, WordOrMore
from nri_gpu.policy.globs import Globs
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
    """Which containers are meant (every key given must match), and what they may have."""

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
        Declaration(
            _LABELS, "Labels of the pod, each with a pattern of its value; the creator of the pod writes them."
        ),
    ] = None
    qos: Annotated[
        frozenset[Qos] | None,
        Declaration(WordOrMore(Qos), "The pod's QoS class, derived from its cgroup; pods without a kubelet have none."),
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
        pod, labels = of.pod, of.pod.labels
        return (
            (self.namespace is None or self.namespace.match(pod.namespace))
            and (self.pod is None or self.pod.match(pod.name))
            and (self.container is None or self.container.match(of.name))
            and (self.runtime_handler is None or self.runtime_handler.match(pod.runtime_handler))
            and (self.qos is None or pod.qos in self.qos)
            and (self.labels is None or all(key in labels and globs.match(labels[key]) for key, globs in self.labels))
        )


class RuleList(Struct, frozen=True):
    """All rules, in the operator's order."""

    rules: tuple[Rule, ...] = ()

    def first(self, of: Container) -> int | None:
        """Index of the first rule that matches a container; None where none does."""
        return next((index for index, rule in enumerate(self.rules) if rule.matches(of)), None)


NO_RULES: Final = RuleList()
