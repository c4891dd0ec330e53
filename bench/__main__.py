"""`make bench`: what it costs, beside the budget. Prints tables; no figure is a failure, because machines differ."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from bench import containerd, decide, dra, record, wire
from bench.containerd import Given
from bench.effort import LEAST, SAMPLES, Effort
from tests.support.errors import HarnessError


class Part(StrEnum):
    """What can be measured alone."""

    DECIDE = "decide"
    WIRE = "wire"
    DRA = "dra"
    CONTAINERD = "containerd"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", type=Part, choices=tuple(Part), help="one part of the bench")
    parser.add_argument(
        "--samples",
        type=_samples,
        default=SAMPLES,
        help="containers per contender, the rest in proportion (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what the containerd part finds in this file")
    group = parser.add_argument_group("the containerd part")
    group.add_argument(
        "--floor",
        type=_places,
        action="append",
        default=[],
        metavar="PLACE[,PLACE...]",
        help="a constant reply for 8 GPUs that mounts the folder of libraries there; repeatable",
    )
    group.add_argument("--match", default="", metavar="REGEX", help="measure only those, besides bare and 8 GPUs")
    args = parser.parse_args()
    effort = Effort.of(args.samples)
    for part in (args.only,) if args.only else Part:
        found = PARTS[part](effort) if part in PARTS else _containerd(effort, Given(args.floor, args.match), args.json)
        for line in found:
            print(line, flush=True)


def _decide(effort: Effort) -> Iterator[str]:
    yield f"{decide.TITLE}\n"
    yield from (figure.line() for figure in decide.figures(effort))
    yield ""


def _wire(effort: Effort) -> Iterator[str]:
    yield f"{wire.TITLE}\n"
    yield from (figure.line() for figure in wire.figures(effort))
    yield ""


def _dra(effort: Effort) -> Iterator[str]:
    yield f"{dra.TITLE}\n"
    yield from (figure.line() for figure in dra.figures(effort))
    yield ""


def _containerd(effort: Effort, given: Given, keep: Path | None) -> Iterator[str]:
    yield f"{containerd.TITLE}\n"
    if os.geteuid():
        yield "Left out: a private containerd needs root (mounts, cgroups, devices); run this with sudo."
        return
    try:
        found = containerd.measure(effort, given)
    except HarnessError as error:
        yield f"Left out: {error}"
        return
    yield from record.lines(found)
    if keep:
        record.write(found, keep)


def _samples(text: str) -> int:
    number = int(text)
    if number < LEAST:
        raise argparse.ArgumentTypeError(f"at least {LEAST}")
    return number


def _places(text: str) -> tuple[str, ...]:
    places = tuple(text.split(","))
    if not all(place.startswith("/") for place in places):
        raise argparse.ArgumentTypeError("places are absolute paths in the container, with commas between")
    return places


PARTS: dict[Part, Callable[[Effort], Iterator[str]]] = {
    Part.DECIDE: _decide,
    Part.WIRE: _wire,
    Part.DRA: _dra,
}

if __name__ == "__main__":
    main()
