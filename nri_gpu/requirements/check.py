"""Checks an image's requirements; a refusal says which condition failed, what the node has, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Final, NamedTuple

from msgspec import Struct

from nri_gpu.domain.text import quoted, shown
from nri_gpu.requirements.grammar import (
    Alternative,
    Condition,
    GpuFacts,
    Malformed,
    Property,
    RequirementFacts,
    Version,
    View,
    parse_requirement,
    sentence,
    views,
)

LEGACY: Final = "CUDA_VERSION (no NVIDIA_REQUIRE_CUDA is set)"

_FACT_MAX: Final = 16  # characters of a version or a brand
_OTHER_NODE: Final = "run it on a node with another driver"
_OTHER_GPU: Final = "ask for other GPUs (clause {} of the annotation), or run it on a node that has them"


def unmet_sentence(
    called: str, failed: Condition, others: int, facts: RequirementFacts, gpu: GpuFacts | None, view: View
) -> str:
    """The refusal for a condition that does not hold. called: the variable. others: alternatives after the first."""
    also = f", and none of its {others} other alternatives holds" if others > 1 else ""
    also = ", and its other alternative does not hold" if others == 1 else also
    return (
        f"{called} needs {shown(failed.text)}{also}; this node has {_has(facts, gpu)}: {_advice(failed, facts, view)}"
    )


def malformed_sentence(called: str, fault: Malformed) -> str:
    """The refusal for a condition that is not valid."""
    return f"{called} cannot be understood: {fault.why}; correct it in the image or the pod"


def oversize_sentence(longest: str, total: int, limit: int) -> str:
    """The refusal for more text than any image needs."""
    what = f"the NVIDIA_REQUIRE_ variables have {total} characters, over the limit of {limit}"
    return f"{what}: shorten {shown(longest)}, the longest"


def not_a_version(value: str) -> str:
    """The refusal for a legacy image's CUDA_VERSION that is not a version."""
    return (
        f"CUDA_VERSION is {quoted(value)}, not a version such as 12.4.1: correct it, or set NVIDIA_REQUIRE_CUDA "
        "(cuda>=12.4), which then counts instead"
    )


def ending(*, disabled: bool, may_disable: bool) -> str:
    """What NVIDIA_DISABLE_REQUIRE would do here, as the end of a sentence."""
    if may_disable:
        return "; NVIDIA_DISABLE_REQUIRE=1 starts it unchecked"
    return "; NVIDIA_DISABLE_REQUIRE is set, but policy does not let it count" if disabled else ""


def _has(facts: RequirementFacts, gpu: GpuFacts | None) -> str:
    node = f"CUDA {_fact(facts.cuda_version)}, driver {_fact(facts.driver_version)}"
    if gpu is None:
        return node
    arch = "{}.{}".format(*gpu.arch) if any(gpu.arch) else ""
    return f"{node}, a GPU of arch {_fact(arch)} and brand {_fact(gpu.brand)}"


def _fact(text: str) -> str:
    return shown(text, _FACT_MAX) if text else "(not known)"


def _advice(failed: Condition, facts: RequirementFacts, view: View) -> str:
    fact = view[failed.property]
    if fact is None:
        return "an unknown fact meets no condition; `nri-gpu gpus` shows what the driver reports"
    match failed.property:
        case Property.ARCH:
            return _OTHER_GPU.format("arch")
        case Property.BRAND:
            return _OTHER_GPU.format("model")
    if not (isinstance(fact, tuple) and isinstance(failed.operand, tuple) and fact < failed.operand):
        return _OTHER_NODE
    if failed.property is Property.CUDA:
        return f"update its driver, or use an image for CUDA {_fact(facts.cuda_version)} or older"
    return f"update its driver, or {_OTHER_NODE}"


PREFIX: Final = "NVIDIA_REQUIRE_"
REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
JETPACK: Final = "NVIDIA_REQUIRE_JETPACK"  # and names that begin with it: values for Tegra boards, not conditions
DISABLE: Final = "NVIDIA_DISABLE_REQUIRE"
CUDA_VERSION: Final = "CUDA_VERSION"

# Names and values of all requirements together. CUDA 13.0 images have 2.2 kB: 60 alternatives, a dozen a driver branch.
TOTAL_MAX: Final = 16 * 1024  # characters
TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})  # Go's strconv.ParseBool
_NUMBER: Final = r"(0|[1-9][0-9]{0,8})"
_SEMVER: Final = re.compile(rf"v?{_NUMBER}(?:\.{_NUMBER}(?:\.{_NUMBER}(?:[-+][0-9A-Za-z.+-]{{1,64}})?)?)?")


class Unmet(Struct, frozen=True):
    """A requirement that does not hold, or is not valid. All three are printable ASCII.

    variable: its name. condition: the one that failed, of several alternatives the first one's; empty when
    there is too much text.
    sentence: at most 400 characters: the condition, what the node has, what to do.
    """

    variable: str
    condition: str
    sentence: str


def concerns(name: str) -> bool:
    """Whether a variable of this name is read here."""
    return name in (CUDA_VERSION, DISABLE) or (name.startswith(PREFIX) and not name.startswith(JETPACK))


def unmet(
    env: Mapping[str, str], facts: RequirementFacts, *, may_disable: bool = False, chars: int = 0
) -> Unmet | None:
    """The first requirement that does not hold, by the order of the variables' names; None when all hold.

    env: the container's, as merged from image and pod; other variables are ignored.
    may_disable: policy lets NVIDIA_DISABLE_REQUIRE turn the check off. chars: the length of all requirements, of which
    env may have only the first.
    """
    disabled = env.get(DISABLE, "") in TRUE
    if disabled and may_disable:
        return None
    node = _Node(facts, views(facts), ending(disabled=disabled, may_disable=may_disable), {})
    stated = {name: env[name] for name in sorted(env) if name.startswith(PREFIX) and concerns(name)}
    sizes = {name: len(name) + len(value) for name, value in stated.items()}
    total = max(sum(sizes.values()), chars)
    if total > TOTAL_MAX:
        longest = max(sizes, key=sizes.__getitem__, default=PREFIX)
        return node.refuses(longest, "", oversize_sentence(longest, total, TOTAL_MAX))
    checks = (_check(name, value, node, shown(name)) for name, value in stated.items())
    return _legacy(env, node) or next(filter(None, checks), None)


class _Node(NamedTuple):
    """What each variable is checked against. ending: the end of a refusal. seen: conditions parsed so far."""

    facts: RequirementFacts
    views: Mapping[GpuFacts | None, View]
    ending: str
    seen: dict[str, Condition]

    def refuses(self, variable: str, condition: str, said: str) -> Unmet:
        return Unmet(shown(variable), shown(condition), sentence(f"{said}{self.ending}."))


def legacy_version(text: str) -> Version | None:
    """Major and minor of an image's CUDA_VERSION; None where it is none."""
    match = _SEMVER.fullmatch(text)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _legacy(env: Mapping[str, str], node: _Node) -> Unmet | None:
    """Images older than NVIDIA_REQUIRE_CUDA say what they need by their CUDA_VERSION."""
    version = env.get(CUDA_VERSION, "")
    if not version or env.get(REQUIRE_CUDA, ""):
        return None
    stated = legacy_version(version)
    if stated is None:
        return node.refuses(CUDA_VERSION, version, not_a_version(version))
    return _check(CUDA_VERSION, "cuda>={}.{}".format(*stated), node, LEGACY)


def _check(variable: str, value: str, node: _Node, called: str) -> Unmet | None:
    """called: what the sentence calls the variable."""
    alternatives = parse_requirement(value, node.seen)
    if isinstance(alternatives, Malformed):
        return node.refuses(variable, alternatives.text, malformed_sentence(called, alternatives))
    for gpu, view in node.views.items():
        if failed := _failed(alternatives, view):
            said = unmet_sentence(called, failed, len(alternatives) - 1, node.facts, gpu, view)
            return node.refuses(variable, failed.text, said)
    return None


def _failed(alternatives: tuple[Alternative, ...], view: View) -> Condition | None:
    """None when an alternative holds, or none is required; else what fails in the first, the image's preferred one."""
    failing = {condition for condition in set(chain.from_iterable(alternatives)) if not condition.holds(view)}
    if not alternatives or any(failing.isdisjoint(each) for each in alternatives):
        return None
    return next(condition for condition in alternatives[0] if condition in failing)
