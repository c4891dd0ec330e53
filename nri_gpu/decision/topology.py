"""The connections of a node's GPUs, a number for each pair, and the choice of the best connected set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from operator import add
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid, Unit, whole
from nri_gpu.domain.gpu_request import Strategy
from nri_gpu.domain.node import Inventory, Link

# Points of a pair, so that placements can be compared with those of others: the nearest common ancestor in the words
# of `nvidia-smi topo -m`, and 100 more for each NVLink (NVIDIA/go-gpuallocator: gpuallocator/device.go). Links into
# switches count too: the inventory gives every pair of such GPUs as many as each has into the switches.
PCIE_POINTS: Final[Mapping[str, int]] = {"PIX": 50, "PXB": 40, "PHB": 30, "NODE": 20, "SYS": 10}
NVLINK_POINTS: Final = 100

Matrix = tuple[tuple[int, ...], ...]


class Topology(Struct, frozen=True):
    """The GPUs of one inventory by their place in it."""

    places: Mapping[GpuUuid, int]
    points: Matrix  # of each pair; 0 with itself, and where no path is known
    near: Matrix  # 1 for two GPUs on one NUMA node, for ties where the machine hides its PCIe tree

    def score(self, some: Iterable[int]) -> int:
        """Return the points of all pairs among some GPUs."""
        return sum(self.points[a][b] for a, b in combinations(some, 2))


def points(link: Link) -> int:
    return PCIE_POINTS.get(link.pcie, 0) + NVLINK_POINTS * link.nvlink


def topology_of(inventory: Inventory) -> Topology:
    gpus = inventory.gpus
    by_index = {gpu.index: place for place, gpu in enumerate(gpus)}
    of_pairs, near = ([[0] * len(gpus) for _ in gpus] for _ in range(2))
    for link in inventory.links:
        if link.a in by_index and link.b in by_index:
            a, b = by_index[link.a], by_index[link.b]
            of_pairs[a][b] = of_pairs[b][a] = points(link)
    for (a, one), (b, other) in combinations(enumerate(gpus), 2):
        if one.numa_node is not None and one.numa_node == other.numa_node:
            near[a][b] = near[b][a] = 1
    places = {gpu.uuid: place for place, gpu in enumerate(gpus)}
    return Topology(places, tuple(map(tuple, of_pairs)), tuple(map(tuple, near)))


def links_among(units: Sequence[Unit], inventory: Inventory) -> Mapping[str, int]:
    """Count the pairs of these GPUs by how they are joined, the best first: `NV18`, `PIX`, `SYS`.

    `?`: no path is known.
    """
    indices = sorted({whole(unit).index for unit in units})
    known = {(link.a, link.b): link for link in inventory.links}
    pairs = [known.get(pair, Link(*pair, pcie="?")) for pair in combinations(indices, 2)]
    words = Counter(
        f"NV{link.nvlink}" if link.nvlink else link.pcie for link in sorted(pairs, key=points, reverse=True)
    )
    return dict(words)


# 248 GPUs (the most that have minors) of 36 NVLinks come to less than half of 2**32 in every rule.
DIGIT: Final = 32  # bits
# Beginnings of sets that are tried, at most (under 0.2 ms): enough for any number of 8 to 10 GPUs, and for 3 of 16.
EXACT_MAX: Final = 256
EXCHANGES_MAX: Final = 1024  # tried for one set: 16 rounds of them for 8 out of 16 GPUs, none for hundreds

_SIGN: Final = {Strategy.PACK: -1, Strategy.SPREAD: 1}


class Surroundings(Struct, frozen=True):
    """The rest of the node, by places in the inventory. friends: GPUs of the pod. free: GPUs of no pod."""

    friends: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    strategy: Strategy = Strategy.PACK


ALONE: Final = Surroundings()


def choose(
    topology: Topology, number: int, pool: tuple[int, ...], taken: tuple[int, ...] = (), around: Surroundings = ALONE
) -> tuple[int, ...]:
    """Return the places of the GPUs to take out of a pool, besides those taken already."""
    size = len(topology.points)
    rows = [[_joined(topology, a, b) << (2 * DIGIT + size) for b in pool] for a in pool]
    alone = [_alone(topology, place, taken, around) for place in pool]
    return tuple(pool[each] for each in best_set(alone, rows, number))


def split(topology: Topology, number: int, pool: tuple[int, ...]) -> tuple[int, ...]:
    """Return the places of so many GPUs of a pool that are joined as little as possible to the rest of it."""
    size = len(topology.points)
    rows = [[_joined(topology, a, b) << size for b in pool] for a in pool]
    # This counts what stays together on both sides: pairs among the chosen twice, less all pairs that a chosen is in.
    alone = [(1 << (size - 1 - place)) - sum(row) for place, row in zip(pool, rows, strict=True)]
    twice = [[2 * each for each in row] for row in rows]
    return tuple(pool[each] for each in best_set(alone, twice, number))


def _alone(topology: Topology, place: int, taken: tuple[int, ...], around: Surroundings) -> int:
    """Return the worth of a GPU without the pairs within the pool."""
    row, size = topology.points[place], len(topology.points)
    friendly = sum(row[each] for each in around.friends)
    freed = _SIGN[around.strategy] * sum(row[each] for each in around.free)
    joined = sum(_joined(topology, place, each) for each in taken)
    return ((((joined << DIGIT) + friendly) << DIGIT) + freed << size) + (1 << (size - 1 - place))


def _joined(topology: Topology, a: int, b: int) -> int:
    return (topology.points[a][b] << DIGIT) + topology.near[a][b]


def best_set(alone: Sequence[int], rows: Sequence[Sequence[int]], number: int) -> tuple[int, ...]:
    """Return so many places whose worth is most. alone: a place's own worth; rows: what each pair adds, 0 with itself.

    Exact up to EXACT_MAX; beyond it grown GPU by GPU from different beginnings, and improved by exchanges.
    """
    if 2 * number > len(alone):
        # Turned around, the question is which GPUs are best left over: only the pairs among those stay.
        least = [-(own + sum(row)) for own, row in zip(alone, rows, strict=True)]
        left = set(best_set(least, rows, len(alone) - number))
        return tuple(place for place in range(len(alone)) if place not in left)
    if not number:
        return ()
    if comb(len(alone), number - 1) <= EXACT_MAX:
        return max(_completed((), 0, alone, rows, number))[1]
    return _greedy(alone, rows, number)


def _completed(
    chosen: tuple[int, ...], worth: int, gains: Sequence[int], rows: Sequence[Sequence[int]], number: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each beginning of a set with its best last member. gains: what each place would add to those chosen."""
    start = chosen[-1] + 1 if chosen else 0
    if number == 1:
        gain = max(gains[start:])
        yield worth + gain, (*chosen, gains.index(gain, start))
        return
    for place in range(start, len(gains) - number + 1):
        grown = list(map(add, gains, rows[place]))
        yield from _completed((*chosen, place), worth + gains[place], grown, rows, number - 1)


def _greedy(alone: Sequence[int], rows: Sequence[Sequence[int]], number: int) -> tuple[int, ...]:
    found: list[tuple[int, tuple[int, ...]]] = []
    seen: set[int] = set()
    for place in range(len(alone)):
        if place not in seen:  # from a GPU in a set already, mostly that set grows again
            found.append(_grown(place, alone, rows, number))
            seen.update(found[-1][1], (place,))
    return max(found)[1]


def _grown(first: int, alone: Sequence[int], rows: Sequence[Sequence[int]], number: int) -> tuple[int, tuple[int, ...]]:
    """Return the set that grows from one GPU by whichever GPU adds most, and its worth."""
    inside, outside = [first], [place for place in range(len(alone)) if place != first]
    gains, worth = list(map(add, alone, rows[first])), alone[first]
    while len(inside) < number:
        place = max(outside, key=gains.__getitem__)
        worth += gains[place]
        outside.remove(place)
        inside.append(place)
        gains = list(map(add, gains, rows[place]))
    return _exchanged(inside, outside, gains, rows, worth)


def _exchanged(
    inside: list[int], outside: list[int], gains: list[int], rows: Sequence[Sequence[int]], worth: int
) -> tuple[int, tuple[int, ...]]:
    """Exchange the GPUs that improve a set most, again and again while there are such; return its worth and the set."""
    for _ in range(EXCHANGES_MAX // (len(inside) * len(outside))):
        better, leaves, comes = max((gains[b] - gains[a] - rows[a][b], a, b) for a in inside for b in outside)
        if better <= 0:
            break
        worth += better
        inside[inside.index(leaves)], outside[outside.index(comes)] = comes, leaves
        gains = [gain + new - old for gain, new, old in zip(gains, rows[comes], rows[leaves], strict=True)]
    return worth, tuple(sorted(inside))
