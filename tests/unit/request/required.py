"""What images require of a node, and what is no condition."""

from __future__ import annotations

from typing import Final

from nri_gpu.request.image_requirements import GpuFacts, RequirementFacts

# What NVIDIA's own images say, rebuilt from the lists that their values are made of.
_TWELVE_ONE: Final = (
    *("tesla", "unknown", "nvidia", "nvidiartx", "geforce"),
    *("geforcertx", "quadro", "quadrortx", "titan", "titanrtx"),
)
_THIRTEEN: Final = (
    *("unknown", "grid", "tesla", "nvidia", "quadro", "quadrortx"),
    *("nvidiartx", "vapps", "vpc", "vcs", "vws", "cloudgaming"),
)


def value(cuda: str, brands: tuple[str, ...], branches: tuple[int, ...]) -> str:
    """The first alternative is the CUDA version, the others driver branches for which there is a compat package."""
    older = (f"brand={brand},driver>={n},driver<{n + 1}" for n in branches for brand in brands)
    return " ".join((f"cuda>={cuda}", *older))


CUDA_12_1: Final = value("12.1", _TWELVE_ONE, (470, 525))
CUDA_13_0: Final = value("13.0", _THIRTEEN, (535, 550, 565, 570, 575))

H100: Final = GpuFacts((9, 0), "nvidia")
V100: Final = GpuFacts((7, 0), "tesla")


def node(driver: str = "560.35.03", cuda: str = "12.6", *gpus: GpuFacts) -> RequirementFacts:
    return RequirementFacts(driver, cuda, gpus or (H100,))


CUDA: Final = "NVIDIA_REQUIRE_CUDA"
NO_GPU = RequirementFacts("560.35.03", "12.6")


REAL = {
    "12.1, an older branch with a compat package": (CUDA_12_1, node("525.147.05", "12.0"), None),
    "12.1, a branch between those listed": (CUDA_12_1, node("515.65.01", "11.7"), "cuda>=12.1"),
    "13.0 on 550 by a brand of its own": (CUDA_13_0, node("550.54.15", "12.4", GpuFacts((8, 9), "vws")), None),
    "13.0 on 550 by `unknown`": (CUDA_13_0, node("550.54.15", "12.4", GpuFacts((8, 9), "geforcertx")), None),
}


MALFORMED = {
    "no value": "cuda>=",
    "no operator": "12",
    "not a version": "cuda>=12.x",
    "digits of another script": "cuda>=\u0661\u0662",
    "a number too large": "cuda>=1000000000",
    "too many components": "cuda>=1.1.1.1.1.1.1.1.1",
    "unknown property": "bogus>=1",
    "a property that casefolds to a known one": "\u017fcuda>=1",
    "order of brands": "brand<tesla",
    "brand with an operator in it": "brand=a=b",
    "a tab instead of a space": "cuda>=12\tbrand=tesla",
    "one condition of many characters": "brand=" + "a" * 123,
    "a version of many digits": "cuda>=" + "1" * 5000,
    "behind an alternative that holds": "cuda>=1 bogus>=1",
    "behind a condition that does not": "cuda>=99,bogus>=1",
}


TRUE = ("1", "t", "T", "true", "TRUE", "True")
NOT_TRUE = ("", "0", "f", "F", "false", "FALSE", "False", "yes", "1 ", " 1", "tRUE", "on", "01", "true\n", "\uff11")
