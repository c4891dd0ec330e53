"""The grammar of `NVIDIA_REQUIRE_*`: alternatives of conditions, and the facts that they are checked against."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from nri_gpu.domain.text import quoted

SENTENCE_MAX: Final = 400  # characters


def sentence(text: str) -> str:
    """The text, clipped to what an event has room for."""
    return text if len(text) <= SENTENCE_MAX else f"{text[: SENTENCE_MAX - 4]}...."


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
    """What a condition is about; the last two differ from GPU to GPU."""

    CUDA = "cuda"
    DRIVER = "driver"
    ARCH = "arch"
    BRAND = "brand"


# The facts about one GPU. A property that is missing counts as met: there is no GPU to check.
View = Mapping[Property, Fact]


class GpuFacts(Struct, frozen=True):
    """One GPU that the container gets; for a MIG device, its parent.

    arch: compute capability, (0, 0) when unknown. brand: a word of BRANDS in any case, empty when it is not known;
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
    """NVML's brand number as a word of BRANDS; numbers from a newer NVML are `unknown`, as in NVIDIA's checker."""
    return BRANDS[number] if 0 <= number < len(BRANDS) else "unknown"


def brand_words(brand: str) -> frozenset[str]:
    """The words that match a GPU of this brand."""
    word = brand.lower()
    return frozenset({word} if word in _CLASSIC else {word, "unknown"})


def version_of(text: str) -> Version | None:
    """A version of digits and dots, without its trailing zeros; None when it is not one."""
    return trimmed(tuple(map(int, text.split(".")))) if _VERSION.fullmatch(text) else None


def trimmed(parts: Version) -> Version:
    """Without trailing zeros; what is left compares as versions do."""
    end = len(parts)
    while end and not parts[end - 1]:
        end -= 1
    return parts[:end]


def views(facts: RequirementFacts) -> dict[GpuFacts | None, View]:
    """The facts for each kind of GPU; under None where there is no GPU."""
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
        """Whether the condition holds. An unknown fact meets no condition, not even `!=`."""
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
    """A value's alternatives, none for a value that requires nothing; or the first condition that is not valid.

    seen: conditions of other values of the same image; real images repeat the same few for a dozen brands.
    """
    seen = {} if seen is None else seen
    for text in _pieces(value):
        if text in seen:
            continue
        condition = _parse_condition(text) if len(seen) < DIFFERENT_MAX else Malformed(text, _one_more(text))
        if isinstance(condition, Malformed):
            return condition
        seen[text] = condition
    pieces = dict.fromkeys(value.split(" "))
    return tuple(filter(None, (tuple(seen[text] for text in piece.split(",") if text) for piece in pieces)))


def _pieces(value: str) -> Iterator[str]:
    """Its conditions, each once, in order."""
    return filter(None, dict.fromkeys(value.replace(" ", ",").split(",")))


def _one_more(text: str) -> str:
    return f"{quoted(text)} is one more than the {DIFFERENT_MAX} different conditions that an image may have"


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
    """What is wrong with a condition that is not valid."""
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
