"""The requirements of images on driver and GPU, in `NVIDIA_REQUIRE_*` and CUDA_VERSION: read, and checked.

A value has alternatives of conditions. A refusal says which condition failed, what the node has, and what to do.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple

from msgspec import Struct

from nri_gpu.domain.text import clipped, quoted, shown

CLAUSE_MAX: Final = 399  # characters: what an event has room for, with a full stop

Version = tuple[int, ...]  # without trailing zeros, so that 12 = 12.0 and tuples compare as versions do
Fact = Version | frozenset[str] | None  # a version, the words of a brand, or not known

# NVML's numbering (nvmlBrandType_t), in the words that CUDA images use.
BRANDS: Final = (
    "unknown",
    "quadro",
    "tesla",
    "nvs",
    "grid",
    "geforce",
    "titan",
    "vapps",
    "vpc",
    "vcs",
    "vws",
    "cloudgaming",
    "quadrortx",
    "nvidiartx",
    "nvidia",
    "geforcertx",
    "titanrtx",
)
# NVIDIA's own checker knows the first seven and calls every later brand unknown, so images list `brand=unknown` with
# the later words: such a GPU has both (libnvidia-container src/driver.c).
_CLASSIC: Final = frozenset(BRANDS[:7])
_VERSION: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}")


class Property(StrEnum):
    """The subject of a condition; the last two differ from GPU to GPU."""

    CUDA = "cuda"
    DRIVER = "driver"
    ARCH = "arch"
    BRAND = "brand"


# The facts about one GPU. A property that is missing counts as met: there is no GPU to check.
View = Mapping[Property, Fact]


class GpuFacts(Struct, frozen=True):
    """A GPU that the container gets; for a MIG device, its parent.

    arch: compute capability, (0, 0) when unknown. brand: a word of BRANDS in any case, or empty if it is not known;
    `unknown` is NVML's own word for some GPUs.
    """

    arch: tuple[int, int]
    brand: str


class RequirementFacts(Struct, frozen=True):
    """The node and the GPUs that the container gets.

    driver_version, cuda_version: empty when unknown; `580.95.05`, and the newest CUDA that the driver supports, `13.0`.
    """

    driver_version: str
    cuda_version: str
    gpus: tuple[GpuFacts, ...] = ()


def brand_word(number: int) -> str:
    """Return NVML's brand number as a word of BRANDS.

    Numbers from a newer NVML are `unknown`, as in NVIDIA's checker.
    """
    return BRANDS[number] if 0 <= number < len(BRANDS) else "unknown"


def brand_words(brand: str) -> frozenset[str]:
    """Return the words that match a GPU of this brand."""
    word = brand.lower()
    return frozenset({word} if word in _CLASSIC else {word, "unknown"})


def version_of(text: str) -> Version | None:
    """Return a version of digits and dots, without its trailing zeros, or None if it is not one."""
    return trimmed(tuple(map(int, text.split(".")))) if _VERSION.fullmatch(text) else None


def trimmed(parts: Version) -> Version:
    """Cut trailing zeros off; what is left compares as versions do."""
    end = len(parts)
    while end and not parts[end - 1]:
        end -= 1
    return parts[:end]


def views(facts: RequirementFacts) -> dict[GpuFacts | None, View]:
    """Return the facts for each kind of GPU, or those of the node under None if there is no GPU."""
    node: View = {
        Property.CUDA: version_of(facts.cuda_version) or None,
        Property.DRIVER: version_of(facts.driver_version) or None,
    }
    if not facts.gpus:
        return {None: node}
    return {gpu: {**node, **_device(gpu)} for gpu in facts.gpus}


def _device(gpu: GpuFacts) -> View:
    return {
        Property.ARCH: trimmed(gpu.arch) or None,
        Property.BRAND: brand_words(gpu.brand) if gpu.brand else None,
    }


# Bounds what hostile text costs in a request: each takes some five microseconds. CUDA 13.0 images have 25.
DIFFERENT_MAX: Final = 128  # conditions
CONDITION_MAX: Final = 128  # characters, as in NVIDIA's checker; it also keeps numbers small enough to convert

_COMPARE: Final[Mapping[str, Callable[[Version, Version], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_PROPERTIES: Final = {name.value: name for name in Property}
_CONDITION: Final = re.compile(
    r"(cuda|driver|arch)([<>]=?|!?=)([0-9.]+)|(brand)(!?=)([a-z0-9_.-]+)", re.ASCII | re.IGNORECASE
)
_OPERATOR: Final = re.compile(r"([<>=!]+)")


class Condition(NamedTuple):
    """`driver>=535`. text: as written, fit to be shown. operand: a version, or for a brand its word in lower case."""

    text: str
    property: Property
    operator: str
    operand: Version | str

    def holds(self, view: View) -> bool:
        """Return whether the condition holds. An unknown fact meets no condition, not even `!=`."""
        if self.property not in view:
            return True
        match view[self.property], self.operand:
            case frozenset() as words, str() as word:
                return (word in words) is (self.operator == "=")
            case tuple() as version, tuple() as operand:
                return _COMPARE[self.operator](version, operand)
            case _:
                return False


Alternative = tuple[Condition, ...]


class Malformed(NamedTuple):
    """A condition that is not valid.

    text: as written, not fit to be shown. why: a clause that quotes it and says what is wrong.
    """

    text: str
    why: str


def parse_requirement(value: str, seen: dict[str, Condition] | None = None) -> tuple[Alternative, ...] | Malformed:
    """Return a value's alternatives, none for a value that requires nothing, or the first condition that is not valid.

    seen: conditions of other values of the same image; real images repeat the same few for a dozen brands.
    """
    seen = {} if seen is None else seen
    for text in _pieces(value):
        if text in seen:
            continue
        if len(seen) >= DIFFERENT_MAX:
            why = f"{quoted(text)} is one more than the {DIFFERENT_MAX} different conditions that an image may have"
            return Malformed(text, why)
        condition = _parse_condition(text)
        if isinstance(condition, Malformed):
            return condition
        seen[text] = condition
    pieces = dict.fromkeys(value.split(" "))
    return tuple(filter(None, (tuple(seen[text] for text in piece.split(",") if text) for piece in pieces)))


def _pieces(value: str) -> Iterator[str]:
    """Return the value's conditions, each once, in order."""
    return filter(None, dict.fromkeys(value.replace(" ", ",").split(",")))


def _parse_condition(text: str) -> Condition | Malformed:
    match = _CONDITION.fullmatch(text) if len(text) <= CONDITION_MAX else None
    if match is None:
        return Malformed(text, _why(text))
    name, comparison, operand = filter(None, match.groups())
    about = _PROPERTIES[name.lower()]
    if about is Property.BRAND:
        return Condition(text, about, comparison, operand.lower())
    version = version_of(operand)
    return Malformed(text, _why(text)) if version is None else Condition(text, about, comparison, version)


def _why(text: str) -> str:
    """Say what is wrong with a condition that is not valid."""
    if len(text) > CONDITION_MAX:
        return f"{quoted(text)} is {len(text)} characters long, over the limit of {CONDITION_MAX} for a condition"
    if not (text.isascii() and text.isprintable()):
        return f"{quoted(text)} is not printable ASCII; spaces part alternatives, commas part conditions"
    name, *rest = _OPERATOR.split(text, maxsplit=1)
    comparison, about = rest[0] if rest else "", _PROPERTIES.get(name.lower())
    if about is None and rest:
        what = f"is about {quoted(name)}" if name else "is about nothing"
        return f"{quoted(text)} {what}, known: {', '.join(_PROPERTIES)}"
    allowed = ("=", "!=") if about is Property.BRAND else tuple(_COMPARE)
    if comparison not in allowed:
        return f"{quoted(text)} needs one of {' '.join(allowed)} between a property and a value"
    if about is Property.BRAND:
        return f"{quoted(text)} needs a brand such as tesla"
    return f"{quoted(text)} needs a version of digits and dots, such as 12.4"


PREFIX: Final = "NVIDIA_REQUIRE_"
REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
JETPACK: Final = "NVIDIA_REQUIRE_JETPACK"  # and names that begin with it: values for Tegra boards, not conditions
DISABLE: Final = "NVIDIA_DISABLE_REQUIRE"
CUDA_VERSION: Final = "CUDA_VERSION"

# Names and values of all requirements together. CUDA 13.0 images have 2.2 kB: 60 alternatives, a dozen a driver branch.
TOTAL_MAX: Final = 16 * 1024  # characters
TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})  # Go's strconv.ParseBool
_NUMBER: Final = r"(0|[1-9][0-9]{0,8})"
# Up to three parts as in Go's semver, and NVIDIA's catalogue of images has a fourth, with zeros: 12.4.1.003.
_SEMVER: Final = re.compile(
    rf"v?{_NUMBER}(?:\.{_NUMBER}(?:\.{_NUMBER}(?:\.[0-9]{{1,9}})?(?:[-+][0-9A-Za-z.+-]{{1,64}})?)?)?"
)
_FACT_MAX: Final = 16  # characters of a version or a brand
_OTHER_NODE: Final = "run it on a node with another driver"
_OTHER_GPU: Final = "ask for other GPUs (clause {} of the annotation), or run it on a node that has them"


class Unmet(Struct, frozen=True):
    """A requirement that does not hold, or is not valid. All three texts are printable ASCII."""

    variable: str  # its name
    condition: str  # the one that failed, of several alternatives the first one's; empty if there is too much text
    clause: str  # the condition, what the node has, what to do; at most 399 characters


def concerns(name: str) -> bool:
    """Return whether a variable of this name is read here."""
    return name in (CUDA_VERSION, DISABLE) or (name.startswith(PREFIX) and not name.startswith(JETPACK))


def unmet(
    env: Mapping[str, str], facts: RequirementFacts, *, may_disable: bool = False, chars: int = 0
) -> Unmet | None:
    """Return the first requirement that does not hold, by the order of the variables' names, or None.

    env: the container's, as merged from image and pod; other variables are ignored. may_disable: policy lets
    NVIDIA_DISABLE_REQUIRE turn the check off. chars: the length of all requirements, of which env may have only the
    first.
    """
    disabled = env.get(DISABLE, "") in TRUE
    if disabled and may_disable:
        return None
    ending = "; NVIDIA_DISABLE_REQUIRE is set, but policy ignores it" if disabled else ""
    node = _Node(facts, views(facts), "; NVIDIA_DISABLE_REQUIRE=1 starts it unchecked" if may_disable else ending, {})
    stated = {name: env[name] for name in sorted(env) if name.startswith(PREFIX) and concerns(name)}
    sizes = {name: len(name) + len(value) for name, value in stated.items()}
    total = max(sum(sizes.values()), chars)
    if total > TOTAL_MAX:
        longest = max(sizes, key=sizes.__getitem__, default=PREFIX)
        what = f"the NVIDIA_REQUIRE_ variables have {total} characters, over the limit of {TOTAL_MAX}"
        return node.refuses(longest, "", f"{what}: shorten {shown(longest)}, the longest")
    checks = (_check(name, value, node, shown(name)) for name, value in stated.items())
    return _legacy(env, node) or next(filter(None, checks), None)


class _Node(NamedTuple):
    """The node that each variable is checked against. ending: the end of a refusal. seen: conditions parsed so far."""

    facts: RequirementFacts
    views: Mapping[GpuFacts | None, View]
    ending: str
    seen: dict[str, Condition]

    def refuses(self, variable: str, condition: str, said: str) -> Unmet:
        return Unmet(shown(variable), shown(condition), clipped(f"{said}{self.ending}", CLAUSE_MAX))


def legacy_version(text: str) -> Version | None:
    """Return major and minor of an image's CUDA_VERSION, or None if it is none."""
    match = _SEMVER.fullmatch(text)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _legacy(env: Mapping[str, str], node: _Node) -> Unmet | None:
    """Check CUDA_VERSION, by which images older than NVIDIA_REQUIRE_CUDA say what they need."""
    version = env.get(CUDA_VERSION, "")
    if not version or env.get(REQUIRE_CUDA, ""):
        return None
    stated = legacy_version(version)
    if stated is None:
        how = "correct it, or set NVIDIA_REQUIRE_CUDA (cuda>=12.4), which then counts instead"
        said = f"CUDA_VERSION is {quoted(version)}, not a version such as 12.4.1: {how}"
        return node.refuses(CUDA_VERSION, version, said)
    called = "CUDA_VERSION (no NVIDIA_REQUIRE_CUDA is set)"
    return _check(CUDA_VERSION, "cuda>={}.{}".format(*stated), node, called)


def _check(variable: str, value: str, node: _Node, called: str) -> Unmet | None:
    """Check the requirement of a variable. called: what the sentence calls the variable."""
    alternatives = parse_requirement(value, node.seen)
    if isinstance(alternatives, Malformed):
        said = f"{called} cannot be understood: {alternatives.why}; correct it in the image or the pod"
        return node.refuses(variable, alternatives.text, said)
    for gpu, view in node.views.items():
        if failed := _failed(alternatives, view):
            said = _unmet_sentence(called, failed, len(alternatives) - 1, node.facts, gpu, view)
            return node.refuses(variable, failed.text, said)
    return None


def _failed(alternatives: tuple[Alternative, ...], view: View) -> Condition | None:
    """Return the first failing condition of the image's preferred (first) alternative.

    None if an alternative holds, or none is given.
    """
    failing = {condition for condition in set(chain.from_iterable(alternatives)) if not condition.holds(view)}
    if not alternatives or any(failing.isdisjoint(each) for each in alternatives):
        return None
    return next(condition for condition in alternatives[0] if condition in failing)


def _unmet_sentence(
    called: str, failed: Condition, others: int, facts: RequirementFacts, gpu: GpuFacts | None, view: View
) -> str:
    """Return the refusal for a condition that does not hold. called: the variable.

    others: alternatives after the first.
    """
    also = f", and none of its {others} other alternatives holds" if others > 1 else ""
    also = ", and its other alternative does not hold" if others == 1 else also
    return (
        f"{called} needs {shown(failed.text)}{also}; this node has {_has(facts, gpu)}: {_advice(failed, facts, view)}"
    )


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
