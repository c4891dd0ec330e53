"""What others would take: go-gpuallocator's best effort, as NVIDIA's device plugin has it, and the first that are free.

Written anew from what is published of the rule (NVIDIA/go-gpuallocator: gpuallocator/besteffort_policy.go). It looks at
every partition of the free GPUs into sets of the size asked for, one of them maybe short; takes the partition with the
most points in all, and of it the best set; the first found wins ties.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, field

from nri_gpu.allocation.ledger import Entry, Ledger, Phase
from nri_gpu.allocation.placement import Asker, place, why_not
from nri_gpu.allocation.topology import Fabric, choose, fabric_of
from nri_gpu.cli.render import table
from nri_gpu.domain.claim import Claim, Count, Mode, Strategy
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant, Reason
from nri_gpu.domain.errors import Exit, InventoryError
from nri_gpu.domain.gpu import whole
from nri_gpu.domain.node import Inventory
from nri_gpu.simulation.topology import load_topology

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


NOT_RUN: Final = f"not run: it looks at every partition, too many above {RIVAL_GPUS_MAX} GPUs"


class Row(Struct, frozen=True):
    """One placement's outcome; None where it was not run."""

    name: str
    outcome: Outcome | None


def run(args: argparse.Namespace) -> int:
    """Print a table of placements."""
    try:
        inventory = load_topology(args.gpus)
    except InventoryError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    player = Player(inventory)
    if player.gpus < 2:
        print(f"nri-gpu: {args.gpus} has fewer than two GPUs that can be granted, so nothing to place", file=sys.stderr)
        return Exit.USAGE
    stream = Stream(requests=args.requests, seed=args.seed, load=args.load, least=args.least)
    rows = tuple(compare(inventory, stream))
    print(json.dumps(to_json(stream, rows), indent=1) if args.output == "json" else to_text(args.gpus, stream, rows))
    return Exit.OK


def compare(inventory: Inventory, stream: Stream) -> Iterator[Row]:
    """The same stream by each placement: ours as `run` places, then the others."""
    player = Player(inventory)
    known = arrivals(stream, player.gpus)
    placings: dict[str, Placing | None] = {
        "nri-gpu": player.ours(Strategy.PACK),
        "nri-gpu, strategy = spread": player.ours(Strategy.SPREAD),
        "go-gpuallocator, best effort": BestEffort(player.fabric) if player.gpus <= RIVAL_GPUS_MAX else None,
        "first fit": first_fit,
    }
    for name, placing in placings.items():
        yield Row(name, play(player, placing, known, stream) if placing else None)


def to_json(stream: Stream, rows: tuple[Row, ...]) -> dict[str, Any]:
    """Schema `nri-gpu/simulate/v1`. Ratios are from 0 to 1; null where nothing was counted."""
    return {
        "schema": "nri-gpu/simulate/v1",
        "requests": stream.requests,
        "seed": stream.seed,
        "load_ratio": stream.load,
        "least_ratio": stream.least,
        "placements": [_json(row) for row in rows],
    }


def _json(row: Row) -> dict[str, Any]:
    if row.outcome is None:
        return {"name": row.name, "fault": NOT_RUN}
    return {
        "name": row.name,
        "link_score_ratio": row.outcome.link_score,
        "best_ratio": row.outcome.best,
        "refused_ratio": row.outcome.refused,
        "refused_large_ratio": row.outcome.refused_large,
    }


def to_text(file: str, stream: Stream, rows: tuple[Row, ...]) -> str:
    """A table, and what its columns are."""
    cells = [
        (row.name, *map(_percent, (one.link_score, one.best, one.refused, one.refused_large)))
        if (one := row.outcome)
        else (row.name, NOT_RUN)
        for row in rows
    ]
    heads = ("PLACEMENT", "LINK SCORE", "BEST SET", "REFUSED", f"REFUSED, {LARGE} AND MORE")
    width = len(heads)
    return "\n".join(
        (
            f"{stream.requests} requests at load {stream.load:g} on {file}, seed {stream.seed}, least {stream.least:g}",
            *table(heads, ((*row, *[""] * (width - len(row))) for row in cells)),
            "LINK SCORE: of sets granted to requests for 2 and more, against the best that this node has of that size.",
            "BEST SET: such requests that got no less than that best.",
        )
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2%}"
