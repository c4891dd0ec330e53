"""Requests that come and go, and what is counted while a placement serves them. The same seed is the same stream."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field

from nri_gpu.allocation.choose import choose
from nri_gpu.allocation.fabric import fabric_of
from nri_gpu.allocation.ledger import Entry, Ledger, Phase
from nri_gpu.allocation.place import Asker, place, why_not
from nri_gpu.domain.claim import Claim, Count, Mode
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant, Reason
from nri_gpu.domain.gpu import Inventory, whole
from nri_gpu.domain.placement import Strategy

# GPUs asked for -> share of the requests: many small ones, few that want a whole machine.
MIX: Final = MappingProxyType({1: 50, 2: 25, 4: 15, 8: 10})
LARGE: Final = 4  # GPUs: requests of so many and more are counted by themselves

# Places of free GPUs in their order, how many are wanted -> places taken. Asked only while there are enough.
Placing = Callable[[tuple[int, ...], int], tuple[int, ...]]


class Stream(Struct, frozen=True, kw_only=True):
    """What is asked.

    load: GPUs asked for at a time, of those there are. least: share of the best link score below which one leaves.
    """

    requests: int
    seed: int
    load: float
    least: float = 0.0


class Arrival(Struct, frozen=True, order=True):
    """One request. comes, goes: in mean durations of a request. size: GPUs."""

    comes: float
    goes: float
    size: int


def arrivals(stream: Stream, gpus: int) -> tuple[Arrival, ...]:
    """Requests that come independently of each other, and stay for times independent of their size."""
    random_ = random.Random(stream.seed)
    sizes = [size for size in MIX if size <= gpus]
    weights = [MIX[size] for size in sizes]
    mean = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    found, now = [], 0.0
    for _ in range(stream.requests):
        now += random_.expovariate(stream.load * gpus / mean)
        (size,) = random_.choices(sizes, weights)
        found.append(Arrival(now, now + random_.expovariate(1.0), size))
    return tuple(found)


class Player:
    """One node, on which streams are played."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._able = tuple(at for at, gpu in enumerate(inventory.gpus) if not why_not(gpu))
        self.fabric = fabric_of(inventory)

    @property
    def able(self) -> tuple[int, ...]:
        """Places of the GPUs that can be granted."""
        return self._able

    @property
    def gpus(self) -> int:
        """How many can be granted."""
        return len(self._able)

    def best_score(self, size: int) -> int:
        """The most that so many GPUs can have on this node."""
        return self.fabric.score(choose(self.fabric, size, self._able))

    def ours(self, strategy: Strategy) -> Placing:
        """As `run` places: by a claim, with a ledger in which somebody else holds the rest."""

        @cache
        def placing(free: tuple[int, ...], size: int) -> tuple[int, ...]:
            asker = Asker(PodUid("asker"), Mode.EXCLUSIVE, strategy)
            claim = Claim(key="gpu.nri.io", text=str(size), wanted=Count(size))
            units = place(claim, asker, self._inventory, self._held_but(free))
            assert not isinstance(units, Reason), units
            return tuple(self.fabric.places[whole(unit).uuid] for unit in units)

        return placing

    def _held_but(self, free: tuple[int, ...]) -> Ledger:
        pod = Pod(id=PodId("other"), uid=PodUid("other"), name="other", namespace="default")
        uuids = tuple(self._inventory.gpus[at].uuid for at in self._able if at not in free)
        grant = Grant.to(Container(id=ContainerId("other"), name="main", pod=pod), uuids, Mode.EXCLUSIVE, "-")
        return Ledger().with_entry(Entry(grant, Phase.RUNNING, 0.0)) if uuids else Ledger()


class Outcome(Struct):
    """What came of a stream. Ratios are None where nothing was counted."""

    ratios: list[float] = field(default_factory=list)
    asked: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})  # large ones under True
    turned_away: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    @property
    def link_score(self) -> float | None:
        """Mean score of sets granted for two GPUs and more, against the best of their size."""
        return _ratio(sum(self.ratios), len(self.ratios))

    @property
    def best(self) -> float | None:
        """How many of these got no less than the best."""
        return _ratio(sum(ratio >= 1 for ratio in self.ratios), len(self.ratios))

    @property
    def refused(self) -> float | None:
        """Of all requests."""
        return _ratio(sum(self.turned_away.values()), sum(self.asked.values()))

    @property
    def refused_large(self) -> float | None:
        """Of those for LARGE and more."""
        return _ratio(self.turned_away[True], self.asked[True])


def _ratio(part: float, whole_: int) -> float | None:
    return part / whole_ if whole_ else None


def play(player: Player, placing: Placing, stream: Sequence[Arrival], rules: Stream) -> Outcome:
    """Serve a stream. A request that finds too few GPUs is refused, and one leaves again that is linked too badly."""
    outcome, free = Outcome(), set(player.able)
    best = {size: player.best_score(size) for size in MIX if size <= player.gpus}
    held: list[tuple[float, tuple[int, ...]]] = []
    for arrival in stream:
        while held and held[0][0] <= arrival.comes:
            free.update(heapq.heappop(held)[1])
        outcome.asked[arrival.size >= LARGE] += 1
        chosen = placing(tuple(sorted(free)), arrival.size) if arrival.size <= len(free) else ()
        ratio = player.fabric.score(chosen) / best[arrival.size] if best[arrival.size] else 1.0
        if not chosen or ratio < rules.least:
            outcome.turned_away[arrival.size >= LARGE] += 1
            continue
        free.difference_update(chosen)
        heapq.heappush(held, (arrival.goes, chosen))
        if arrival.size > 1:
            outcome.ratios.append(ratio)
    return outcome
