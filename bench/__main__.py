"""`make bench`: what it costs, beside the budget. Prints tables; no figure is a failure, because machines differ."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from enum import StrEnum

from bench import containerd, decide, dra, wire
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
    args = parser.parse_args()
    for part in (args.only,) if args.only else Part:
        for line in PARTS[part](Effort.of(args.samples)):
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


def _containerd(effort: Effort) -> Iterator[str]:
    yield f"{containerd.TITLE}\n"
    if os.geteuid():
        yield "Left out: a private containerd needs root (mounts, cgroups, devices); run this with sudo."
        return
    try:
        yield from (figure.line() for figure in containerd.figures(effort))
    except HarnessError as error:
        yield f"Left out: {error}"


def _samples(text: str) -> int:
    number = int(text)
    if number < LEAST:
        raise argparse.ArgumentTypeError(f"at least {LEAST}")
    return number


PARTS: dict[Part, Callable[[Effort], Iterator[str]]] = {
    Part.DECIDE: _decide,
    Part.WIRE: _wire,
    Part.DRA: _dra,
    Part.CONTAINERD: _containerd,
}

if __name__ == "__main__":
    main()
