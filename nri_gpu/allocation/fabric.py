"""How well the GPUs of a node reach each other: a number for each pair, made once for each inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid, Inventory, Link, Unit, whole

# Points of a pair, so that placements can be compared with those of others: the nearest common ancestor in the words
# of `nvidia-smi topo -m`, and 100 more for each NVLink (NVIDIA/go-gpuallocator: gpuallocator/device.go). Links into
# switches count too: the inventory gives every pair of such GPUs as many as each has into the switches.
PCIE_POINTS: Final[Mapping[str, int]] = {"PIX": 50, "PXB": 40, "PHB": 30, "NODE": 20, "SYS": 10}
NVLINK_POINTS: Final = 100

Matrix = tuple[tuple[int, ...], ...]


class Fabric(Struct, frozen=True, eq=False):
    """The GPUs of one inventory by their place in it. Compared by identity: it is part of keys in the hook path.

    points: of each pair; 0 with itself, and where no path is known. near: 1 for two GPUs on one NUMA node, for ties
    where the machine hides its PCIe tree.
    """

    places: Mapping[GpuUuid, int]
    points: Matrix
    near: Matrix

    def score(self, some: Iterable[int]) -> int:
        """Points of all pairs among some GPUs."""
        return sum(self.points[a][b] for a, b in combinations(some, 2))


def points(link: Link) -> int:
    """Of one pair."""
    return PCIE_POINTS.get(link.pcie, 0) + NVLINK_POINTS * link.nvlink


_kept: list[tuple[Inventory, Fabric]] = []  # the last one asked for: the hook asks for the same until GPUs change


def fabric_of(inventory: Inventory) -> Fabric:
    """The fabric of an inventory; the very same object for the very same inventory, asked again."""
    for known, fabric in _kept:
        if known is inventory:
            return fabric
    fabric = _fabric(inventory)
    _kept[:] = [(inventory, fabric)]
    return fabric


def _fabric(inventory: Inventory) -> Fabric:
    gpus = inventory.gpus
    by_index = {gpu.index: place for place, gpu in enumerate(gpus)}
    of_pair = {(by_index.get(link.a), by_index.get(link.b)): points(link) for link in inventory.links}
    nodes = [gpu.numa_node for gpu in gpus]
    everybody = range(len(gpus))
    return Fabric(
        places={gpu.uuid: place for place, gpu in enumerate(gpus)},
        points=tuple(
            tuple(of_pair.get((a, b), of_pair.get((b, a), 0)) if a != b else 0 for b in everybody) for a in everybody
        ),
        near=tuple(
            tuple(int(a != b and nodes[a] is not None and nodes[a] == nodes[b]) for b in everybody) for a in everybody
        ),
    )


def links_among(units: Sequence[Unit], inventory: Inventory) -> Mapping[str, int]:
    """How many pairs of these GPUs are joined how, the best first: `NV18`, `PIX`, `SYS`; `?`: no path is known."""
    indices = sorted({whole(unit).index for unit in units})
    known = {(link.a, link.b): link for link in inventory.links}
    pairs = [known.get(pair, Link(*pair, pcie="?")) for pair in combinations(indices, 2)]
    words = Counter(
        f"NV{link.nvlink}" if link.nvlink else link.pcie for link in sorted(pairs, key=points, reverse=True)
    )
    return dict(words)
