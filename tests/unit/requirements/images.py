"""What NVIDIA's own images say, rebuilt from the lists that their values are made of; and nodes to run them on."""

from __future__ import annotations

from typing import Final

from nri_gpu.requirements.check import GpuFacts, RequirementFacts

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


CUDA_11_0: Final = value("11.0", ("tesla",), (418, 440, 450))
CUDA_12_1: Final = value("12.1", _TWELVE_ONE, (470, 525))
CUDA_12_9: Final = value("12.9", _THIRTEEN, (535, 550, 560, 565, 570))
CUDA_13_0: Final = value("13.0", _THIRTEEN, (535, 550, 565, 570, 575))

H100: Final = GpuFacts((9, 0), "nvidia")
A100: Final = GpuFacts((8, 0), "nvidia")
V100: Final = GpuFacts((7, 0), "tesla")
RTX_3090: Final = GpuFacts((8, 6), "geforce")


def node(driver: str = "560.35.03", cuda: str = "12.6", *gpus: GpuFacts) -> RequirementFacts:
    return RequirementFacts(driver, cuda, gpus or (H100,))
