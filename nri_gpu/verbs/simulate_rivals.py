"""What others would take: go-gpuallocator's best effort, as NVIDIA's device plugin has it, and the first that are free.

Written anew from what is published of the rule (NVIDIA/go-gpuallocator: gpuallocator/besteffort_policy.go). It looks at
every partition of the free GPUs into sets of the size asked for, one of them maybe short; takes the partition with the
most points in all, and of it the best set; the first found wins ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Final

from nri_gpu.allocation.fabric import Fabric

RIVAL_GPUS_MAX: Final = 8  # 105 partitions into pairs; of 16 GPUs there are two million
_Partition = tuple[tuple[int, ...], ...]
_HOLE: Final = -1


def first_fit(free: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The lowest indices."""
    return free[:size]


class BestEffort:
    """Their rule on one fabric. Answers are remembered: a stream asks the same again and again."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._known: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}

    def __call__(
        self, available: tuple[int, ...], size: int, required: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """The set they take, in order; empty when there is none. available: its order breaks ties."""
        if not 0 < size <= len(available) or len(required) > size or not required <= set(available):
            return ()
        key = (available, size, required)
        if key not in self._known:
            self._known[key] = tuple(sorted(self._taken(*key)))
        return self._known[key]

    def _taken(self, available: tuple[int, ...], size: int, required: frozenset[int]) -> tuple[int, ...]:
        best: tuple[int, ...] = ()
        most = -1
        for partition in _partitions(available, size):
            fitting = [one for one in partition if _HOLE not in one and required <= set(one)]
            total = sum(map(self._score, partition))
            if fitting and total > most:
                best, most = max(fitting, key=self._score), total  # the first of the best, as max does it
        return best

    def _score(self, some: tuple[int, ...]) -> int:
        return self._fabric.score(place for place in some if place != _HOLE)


def _partitions(available: tuple[int, ...], size: int) -> Iterator[_Partition]:
    if size == 1:
        yield tuple((place,) for place in available)
        return
    holes = -len(available) % size
    yield from _split((*available, *[_HOLE] * holes), size, holes)


def _split(rest: tuple[int, ...], size: int, holes: int) -> Iterator[_Partition]:
    """The first joins every choice of the others, in order; then what is left. All holes are in one set."""
    if not rest:
        yield ()
        return
    for places in combinations(range(1, len(rest)), size - 1):
        some = (rest[0], *(rest[place] for place in places))
        if some.count(_HOLE) in (0, holes):
            left = tuple(each for place, each in enumerate(rest) if place and place not in places)
            yield from ((some, *others) for others in _split(left, size, holes))
