"""Compares placements over a stream of requests on a simulated node: `python -m bench.placement FILE`.

Requests for 1, 2, 4 and 8 GPUs come and go. Each placement serves the same stream: ours, go-gpuallocator's best effort
(the rule of NVIDIA's device plugin), and the first free GPUs. docs/placement.md explains the table.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field

from nri_gpu.cli.page import table
from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import why_not
from nri_gpu.decision.topology import Topology, choose, topology_of
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant, Reason
from nri_gpu.domain.errors import Exit, InventoryError
from nri_gpu.domain.gpu import whole
from nri_gpu.domain.gpu_request import Claim, Count, Mode, Strategy
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger

BEST_EFFORT_GPUS_MAX: Final = 8  # 105 partitions into pairs; 16 GPUs have two million
NOT_RUN: Final = f"not run: it looks at every partition, too many above {BEST_EFFORT_GPUS_MAX} GPUs"
# GPUs asked for -> share of the requests: many small ones, few that want a whole machine.
MIX: Final = MappingProxyType({1: 50, 2: 25, 4: 15, 8: 10})
LARGE: Final = 4  # GPUs; requests for this many or more are also counted by themselves

# (free places in order, number wanted) -> places taken. Called only while enough are free.
Placing = Callable[[tuple[int, ...], int], tuple[int, ...]]
_Partition = tuple[tuple[int, ...], ...]
_HOLE: Final = -1


class Stream(Struct, frozen=True, kw_only=True):
    """The requests to make.

    load: GPUs asked for at a time, as a share of those there are. least: share of the best link score below which a
    request refuses what it is offered.
    """

    requests: int
    seed: int
    load: float
    least: float = 0.0


class Arrival(Struct, frozen=True, order=True):
    """One request for `size` GPUs. comes, goes: in mean durations of a request."""

    comes: float
    goes: float
    size: int


def arrivals(stream: Stream, gpus: int) -> tuple[Arrival, ...]:
    """Requests that come independently of each other and stay for times independent of their size."""
    source = random.Random(stream.seed)
    sizes = [size for size in MIX if size <= gpus]
    weights = [MIX[size] for size in sizes]
    mean = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    found, now = [], 0.0
    for _ in range(stream.requests):
        now += source.expovariate(stream.load * gpus / mean)
        (size,) = source.choices(sizes, weights)
        found.append(Arrival(now, now + source.expovariate(1.0), size))
    return tuple(found)


def first_fit(free: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The lowest places."""
    return free[:size]


class BestEffort:
    """go-gpuallocator's rule on one fabric, written anew (NVIDIA/go-gpuallocator: gpuallocator/besteffort_policy.go).

    It looks at every partition of the free GPUs into sets of the size asked for, the last of which may be short, takes
    the partition with the highest total score, and the best set of it. The first found wins ties.
    """

    def __init__(self, fabric: Topology) -> None:
        self._fabric = fabric
        self._known: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}

    def __call__(
        self, available: tuple[int, ...], size: int, required: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """The set it takes, in order; empty when there is none. The order of `available` breaks ties."""
        if not 0 < size <= len(available) or len(required) > size or not required <= set(available):
            return ()
        key = (available, size, required)
        if key not in self._known:  # a stream asks the same again and again
            self._known[key] = tuple(sorted(self._taken(*key)))
        return self._known[key]

    def _taken(self, available: tuple[int, ...], size: int, required: frozenset[int]) -> tuple[int, ...]:
        best: tuple[int, ...] = ()
        most = -1
        for partition in _partitions(available, size):
            fitting = [one for one in partition if _HOLE not in one and required <= set(one)]
            total = sum(map(self._score, partition))
            if fitting and total > most:
                best, most = max(fitting, key=self._score), total  # max returns the first of equals
        return best

    def _score(self, some: tuple[int, ...]) -> int:
        return self._fabric.score(each for each in some if each != _HOLE)


def _partitions(available: tuple[int, ...], size: int) -> Iterator[_Partition]:
    if size == 1:
        yield tuple((each,) for each in available)
        return
    holes = -len(available) % size
    yield from _split((*available, *[_HOLE] * holes), size, holes)


def _split(rest: tuple[int, ...], size: int, holes: int) -> Iterator[_Partition]:
    """Joins the first with every choice of the others, in order, then splits what is left. One set has all holes."""
    if not rest:
        yield ()
        return
    for chosen in combinations(range(1, len(rest)), size - 1):
        some = (rest[0], *(rest[at] for at in chosen))
        if some.count(_HOLE) in (0, holes):
            left = tuple(each for at, each in enumerate(rest) if at and at not in chosen)
            yield from ((some, *others) for others in _split(left, size, holes))


class Player:
    """Plays streams on one node. able: places of the GPUs that can be granted."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self.able = tuple(at for at, gpu in enumerate(inventory.gpus) if not why_not(gpu))
        self.fabric = topology_of(inventory)

    def ours(self, strategy: Strategy) -> Placing:
        """Places a claim as `run` does, with a ledger in which another pod holds the GPUs that are not free."""

        @cache
        def placing(free: tuple[int, ...], size: int) -> tuple[int, ...]:
            asker = Asker(PodUid("asker"), Mode.EXCLUSIVE, strategy)
            claim = Claim(key="gpu.nri.io", text=str(size), wanted=Count(size))
            units = place(claim, asker, self._inventory, self._held_but(free).usage())
            assert not isinstance(units, Reason), units
            return tuple(self.fabric.places[whole(unit).uuid] for unit in units)

        return placing

    def _held_but(self, free: tuple[int, ...]) -> Ledger:
        pod = Pod(id=PodId("other"), uid=PodUid("other"), name="other", namespace="default")
        uuids = tuple(self._inventory.gpus[at].uuid for at in self.able if at not in free)
        grant = Grant.to(Container(id=ContainerId("other"), name="main", pod=pod), uuids, Mode.EXCLUSIVE, "-")
        return Ledger().with_entry(Entry(grant, GrantPhase.RUNNING, 0.0)) if uuids else Ledger()

    def play(self, placing: Placing, requests: Sequence[Arrival], least: float = 0.0) -> Outcome:
        """Serves a stream. Refuses a request that finds too few free GPUs, or a set below `least` of the best score."""
        outcome, free = Outcome(), set(self.able)
        best = {size: self.fabric.score(choose(self.fabric, size, self.able)) for size in MIX if size <= len(self.able)}
        held: list[tuple[float, tuple[int, ...]]] = []
        for arrival in requests:
            while held and held[0][0] <= arrival.comes:
                free.update(heapq.heappop(held)[1])
            outcome.asked[arrival.size >= LARGE] += 1
            chosen = placing(tuple(sorted(free)), arrival.size) if arrival.size <= len(free) else ()
            ratio = self.fabric.score(chosen) / best[arrival.size] if best[arrival.size] else 1.0
            if not chosen or ratio < least:
                outcome.turned_away[arrival.size >= LARGE] += 1
                continue
            free.difference_update(chosen)
            heapq.heappush(held, (arrival.goes, chosen))
            if arrival.size > 1:
                outcome.ratios.append(ratio)
        return outcome


class Outcome(Struct):
    """Counts of one placement, large requests under True. Ratios are None where nothing was counted."""

    ratios: list[float] = field(default_factory=list)
    asked: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    turned_away: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    @property
    def link_score(self) -> float | None:
        """Mean score of sets granted for two GPUs and more, against the best of their size."""
        return _ratio(sum(self.ratios), len(self.ratios))

    @property
    def best(self) -> float | None:
        """Share of these sets that got the best score."""
        return _ratio(sum(ratio >= 1 for ratio in self.ratios), len(self.ratios))

    @property
    def refused(self) -> float | None:
        """Share of all requests."""
        return _ratio(sum(self.turned_away.values()), sum(self.asked.values()))

    @property
    def refused_large(self) -> float | None:
        """Share of the requests for LARGE GPUs and more."""
        return _ratio(self.turned_away[True], self.asked[True])


def _ratio(part: float, total: int) -> float | None:
    return part / total if total else None


def compare(inventory: Inventory, stream: Stream) -> dict[str, Outcome | None]:
    """Placement -> outcome on the same stream; None where it was not run."""
    player = Player(inventory)
    requests = arrivals(stream, len(player.able))
    placings: dict[str, Placing | None] = {
        "nri-gpu": player.ours(Strategy.PACK),
        "nri-gpu, strategy = spread": player.ours(Strategy.SPREAD),
        "go-gpuallocator, best effort": BestEffort(player.fabric) if len(player.able) <= BEST_EFFORT_GPUS_MAX else None,
        "first fit": first_fit,
    }
    return {name: player.play(each, requests, stream.least) if each else None for name, each in placings.items()}


def report(file: str, stream: Stream, outcomes: dict[str, Outcome | None]) -> str:
    """The table, with an explanation of its columns."""
    heads = ("PLACEMENT", "LINK SCORE", "BEST SET", "REFUSED", f"REFUSED, {LARGE} AND MORE")
    rows = [
        (name, *map(_percent, (one.link_score, one.best, one.refused, one.refused_large)))
        if one
        else (name, NOT_RUN, "", "", "")
        for name, one in outcomes.items()
    ]
    return "\n".join(
        (
            f"{stream.requests} requests at load {stream.load:g} on {file}, seed {stream.seed}, least {stream.least:g}",
            *table(heads, rows),
            "LINK SCORE: of sets granted to requests for 2 and more, against the best that this node has of that size.",
            "BEST SET: such requests that got no less than that best.",
        )
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="topology file of the node", metavar="FILE")
    parser.add_argument("--requests", help="how many (%(default)s)", type=int, default=10_000, metavar="N")
    parser.add_argument(
        "--seed", help="the same seed makes the same stream (%(default)s)", type=int, default=1, metavar="N"
    )
    parser.add_argument(
        "--load", help="GPUs asked for, of those there are (%(default)s)", type=float, default=0.8, metavar="RATIO"
    )
    parser.add_argument(
        "--least",
        help="share of the best link score below which a request is refused (%(default)s: none)",
        type=float,
        default=0.0,
        metavar="RATIO",
    )
    args = parser.parse_args(argv)
    if args.requests < 1 or not args.load > 0:
        parser.error("--requests must be at least 1 and --load more than 0")
    try:
        inventory = load_topology(args.file)
    except InventoryError as error:
        print(f"placement: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    if len(Player(inventory).able) < 2:
        print(f"placement: {args.file} has fewer than two GPUs that can be granted", file=sys.stderr)
        return Exit.USAGE
    stream = Stream(requests=args.requests, seed=args.seed, load=args.load, least=args.least)
    print(report(args.file, stream, compare(inventory, stream)))
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
