"""`[[rule]]`: which containers a rule matches, and what they may have. The first rule that matches decides."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import Container, Qos
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capabilities
from nri_gpu.policy.forms import (
    DEFAULT_EXTRAS,
    Globs,
    NamePattern,
    Otherwise,
    PoolName,
    about,
    changes,
    labels,
    pattern_or_more,
    text,
    word_or_more,
)
from nri_gpu.policy.limits import Limits

RULES_MAX: Final = 8192

_NAMES: Final = pattern_or_more(NamePattern)
_LABELS: Final = labels(
    # Kubernetes: a prefix of at most 253 characters, a slash, a name of at most 63.
    Annotated[str, text(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9_.-]+", "a label's key, such as app.kubernetes.io/name", 317)],
    Annotated[str, text(r"[!-~]*", "a pattern of printable ASCII without blanks", 63)],
)
_NAME: Final = text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_REASON: Final = text(r"[ -~]+", "printable ASCII on one line", 200)


class Rule(Struct, frozen=True, kw_only=True):
    """Which containers are meant (every key given must match), and what they may have."""

    allow: Annotated[bool, about("Whether they may have GPUs: true or false.")]
    name: Annotated[str, _NAME, about("What sentences and the log call this rule.")] = ""
    namespace: Annotated[Globs | None, _NAMES, about("Patterns of the pod's namespace.")] = None
    pod: Annotated[Globs | None, _NAMES, about("Patterns of the pod's name.")] = None
    container: Annotated[Globs | None, _NAMES, about("Patterns of the container's name.")] = None
    runtime_handler: Annotated[
        Globs | None, _NAMES, about("Patterns of the runtime handler, which a RuntimeClass names.")
    ] = None
    labels: Annotated[
        tuple[tuple[str, Globs], ...] | None,
        _LABELS,
        about("Labels of the pod, each with a pattern of its value; the creator of the pod writes them."),
    ] = None
    qos: Annotated[
        frozenset[Qos] | None,
        word_or_more(Qos),
        about("The pod's QoS class, derived from its cgroup; pods without a kubelet have none."),
    ] = None
    reason: Annotated[str, _REASON, about("Why; a refusal says it.")] = ""
    otherwise: Annotated[
        Otherwise | None,
        about("With allow = false: refuse the container, or start it without GPUs."),
    ] = None
    default_mode: Annotated[Mode | None, about("In place of defaults.mode.")] = None
    modes: Annotated[
        frozenset[Mode] | None, Meta(min_length=1), about("Modes to ask for, in place of modes.allowed.")
    ] = None
    default_capabilities: Annotated[
        Capabilities | None, Meta(min_length=1), about("In place of defaults.capabilities.")
    ] = None
    capabilities: Annotated[
        Capabilities | None,
        Meta(min_length=1),
        about("Parts of the driver to ask for, in place of capabilities.allowed."),
    ] = None
    default_extras: Annotated[frozenset[Extra] | None, DEFAULT_EXTRAS, about("In place of defaults.extras.")] = None
    extras: Annotated[
        frozenset[Extra] | None,
        about("Extras to ask for, in place of extras.allowed."),
    ] = None
    pool: Annotated[
        Globs | None, pattern_or_more(PoolName), about("Names of the pools they get GPUs from, and no others.")
    ] = None
    limits: Annotated[
        tuple[tuple[str, Any], ...] | None, changes(Limits), about("Limits in place of those in [limits].")
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
