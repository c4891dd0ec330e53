"""Nodes by the rules their makers wire them by: what GPU allocators are compared on.

Sources: NVIDIA/go-gpuallocator gpuallocator/common_test.go (DGX-1, RTX 8000); `nvidia-smi topo -m` as people published
it: NVIDIA/nccl-tests#78 (DGX-2), NVIDIA/nccl#1505 (DGX A100), HGX H100, kubernetes/kubernetes#53497 (eight on PCIe).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Final

from nri_gpu.domain.node import Inventory, Link
from tests.support import builders as make

Pcie = Callable[[int, int], str]
V100_NVLINKS: Final = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
P100_NVLINKS: Final = (
    (0, 1, 1, 1, 1, 0, 0, 0),
    (1, 0, 1, 1, 0, 1, 0, 0),
    (1, 1, 0, 1, 0, 0, 1, 0),
    (1, 1, 1, 0, 0, 0, 0, 1),
    (1, 0, 0, 0, 0, 1, 1, 1),
    (0, 1, 0, 0, 1, 0, 1, 1),
    (0, 0, 1, 0, 1, 1, 0, 1),
    (0, 0, 0, 1, 1, 1, 1, 0),
)
RTX_NVLINKS: Final = ((0, 0, 0, 2), (0, 0, 2, 0), (0, 2, 0, 0), (2, 0, 0, 0))


def _levels(*groups: tuple[str, int]) -> Pcie:
    """Aligned groups, the nearest first: `("PIX", 2)` are 0-1, 2-3 and so on."""

    def pcie(a: int, b: int) -> str:
        return next((word for word, size in groups if a // size == b // size), "SYS")

    return pcie


def _p100(a: int, b: int) -> str:
    if {a, b} in ({0, 2}, {1, 3}, {4, 6}, {5, 7}):
        return "PIX"
    return "PHB" if a // 4 == b // 4 else "SYS"


def _rtx8000(a: int, b: int) -> str:
    return {(0, 1): "NODE", (2, 3): "NODE", (0, 2): "SYS", (1, 3): "SYS"}.get((a, b), "")


def inventory(number: int, pcie: Pcie, nvlinks: Sequence[Sequence[int]] | int = 0) -> Inventory:
    """So many GPUs; nvlinks: by pair, or as many between all."""
    links = (
        Link(a, b, pcie(a, b), nvlinks if isinstance(nvlinks, int) else nvlinks[a][b])
        for a, b in combinations(range(number), 2)
    )
    return make.inventory(make.gpus(number), links=tuple(links))


_SWITCHES: Final = _levels(("PIX", 2), ("PHB", 4))
KNOWN: Final[Mapping[str, Inventory]] = {
    "rtx8000": inventory(4, _rtx8000, RTX_NVLINKS),
    "dgx1-p100": inventory(8, _p100, P100_NVLINKS),
    "dgx1-v100": inventory(8, _SWITCHES, V100_NVLINKS),
    "a100, PCIe": inventory(8, _levels(("PXB", 2))),
    "a100": inventory(8, _levels(("PXB", 2)), 12),
    "h100, PCIe": inventory(8, _levels(("NODE", 4))),
    "h100": inventory(8, _levels(("NODE", 4)), 18),
    "8 x PCIe": inventory(8, _SWITCHES),
    "dgx2, PCIe": inventory(16, _levels(("PIX", 2), ("PXB", 4), ("NODE", 8))),
    "dgx2": inventory(16, _levels(("PIX", 2), ("PXB", 4), ("NODE", 8)), 6),
}
