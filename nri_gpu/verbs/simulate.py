"""`nri-gpu simulate`: a stream of requests on a simulated node, placed by us and by others, and what comes of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Inventory
from nri_gpu.domain.placement import Strategy
from nri_gpu.inventory.topology import load_topology
from nri_gpu.verbs.exits import Exit
from nri_gpu.verbs.gpus import table
from nri_gpu.verbs.simulate_rivals import RIVAL_GPUS_MAX, BestEffort, first_fit
from nri_gpu.verbs.simulate_stream import LARGE, Outcome, Placing, Player, Stream, arrivals, play

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
