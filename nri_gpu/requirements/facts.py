"""What the node has, in the words that requirements are written in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

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
# NVIDIA's own checker knows the first seven and calls every later brand unknown, so images list `brand=unknown` beside
# the later words: such a GPU answers to both (libnvidia-container src/driver.c).
_CLASSIC: Final = frozenset(BRANDS[:7])
_VERSION: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}")


class Property(StrEnum):
    """What a condition can be about; the last two are each GPU's own."""

    CUDA = "cuda"
    DRIVER = "driver"
    ARCH = "arch"
    BRAND = "brand"


# What one GPU's checking looks things up in. A property that is missing counts as true: there is no GPU to ask.
View = Mapping[Property, Fact]


class GpuFacts(Struct, frozen=True):
    """One GPU that the container gets; for a MIG device, its parent.

    arch: compute capability, (0, 0) when unknown. brand: a word of BRANDS in any case, empty when it was not asked;
    `unknown` is what NVML itself says of some GPUs, and is known.
    """

    arch: tuple[int, int]
    brand: str


class Facts(Struct, frozen=True):
    """The node and the GPUs that the container gets.

    driver_version, cuda_version: empty when unknown; `580.95.05`, and the newest CUDA that driver speaks, `13.0`.
    """

    driver_version: str
    cuda_version: str
    gpus: tuple[GpuFacts, ...] = ()


def brand_word(number: int) -> str:
    """NVML's brand number as a word of BRANDS; numbers from a newer NVML are `unknown`, as NVIDIA's checker has it."""
    return BRANDS[number] if 0 <= number < len(BRANDS) else "unknown"


def brand_words(brand: str) -> frozenset[str]:
    """The words that a GPU of this brand answers to."""
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


def views(facts: Facts) -> dict[GpuFacts | None, View]:
    """What conditions are looked up in, once for each kind of GPU; once without any (None) where there is no GPU."""
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
