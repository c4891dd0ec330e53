"""Create and start of one container on a real containerd: every contender once a round, in random order.

Machines slow down and recover while one waits, so a contender is compared with its neighbours of the same round only.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from bench import contenders
from bench.contenders import BARE, EIGHT, RIVALS
from bench.effort import Effort
from bench.figures import paired
from bench.record import LeftOut, Measured, Record
from bench.sites import Added, Contender, Cost, Sites
from bench.wire import reply_s
from tests import ground
from tests.reliability.result import machine
from tests.support import packages

TITLE: Final = "Create + start of one container on a real containerd, against bare (NRI off, no GPU); CPU likewise"
TOOLKIT: Final = "github.com/NVIDIA/nvidia-container-toolkit"
Found = TypeVar("Found")


class Given(Struct, frozen=True):
    """What the command line names. floors: of contenders.always. match: who is measured, besides bare and 8 GPUs."""

    floors: Sequence[Sequence[str]] = ()
    match: str = ""


def measure(effort: Effort, given: Given) -> Record:
    """All of this part. Raises: HarnessError where no containerd can be had, or a contender is not what it says."""
    date, began, before = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), time.monotonic(), machine()
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder, ExitStack() as stack:
        sites = Sites(stack, Path(folder), contenders.server_driver(Path(folder) / "driver"))
        entered = dict(contenders.always(sites, given.floors))
        left_out = []
        for rival in RIVALS:
            if folder_of := ground.built(rival.set_name):
                entered |= rival.make(sites, folder_of)
            else:
                needs = f"{rival.set_name} of tests/ground is not built (`make ground`)"
                left_out += [LeftOut(name, needs) for name in rival.names]
        entered = {
            name: each for name, each in entered.items() if name in (BARE, EIGHT) or re.search(given.match, name)
        }
        reply = reply_s(Path(folder), "all", effort.requests)
        plain = entered[BARE].oci()
        additions = {name: Added.between(each.oci(), plain) for name, each in entered.items()}
        costs = _rounds(entered, effort.containers, Contender.life, effort.warm_up_rounds)
        started = _rounds(entered, effort.crowds, lambda one: one.per_second(effort.jobs, effort.crowd))
    wall_s = statistics.median(cost.wall_s for cost in costs[EIGHT])
    return Record(
        date,
        round(time.monotonic() - began),
        before | {"containerd": sites.release, "runc": _runc(), "NVIDIA's toolkit": ground.version("nvidia", TOOLKIT)},
        effort.containers,
        effort.jobs,
        round(reply / wall_s * 100, 2),
        [
            _measured(name, additions[name], (costs[name], costs[BARE]), (started[name], started[BARE]))
            for name in entered
        ],
        left_out,
    )


def _rounds(
    entered: Mapping[str, Contender], rounds: int, measure_one: Callable[[Contender], Found], warm_up: int = 0
) -> Mapping[str, list[Found]]:
    found: Mapping[str, list[Found]] = {name: [] for name in entered}
    for _ in range(warm_up + rounds):
        for name in random.sample(list(entered), len(entered)):
            found[name].append(measure_one(entered[name]))
    return {name: each[warm_up:] for name, each in found.items()}


def _measured(
    name: str, added: Added, costs: tuple[list[Cost], list[Cost]], started: tuple[list[float], list[float]]
) -> Measured:
    """Each pair: its own, and those of bare."""
    ours, bare = costs
    return Measured(
        name=name,
        nodes=len(added.nodes),
        mounts=len(added.mounts),
        hooks=len(added.hooks),
        wall=paired([cost.wall_s for cost in ours], [cost.wall_s for cost in bare]).rounded(),
        cpu=paired([cost.cpu_s for cost in ours], [cost.cpu_s for cost in bare]).rounded(),
        started=paired(*started).rounded(),
        wall_ms=[round(cost.wall_s * 1e3, 2) for cost in ours],
        cpu_ms=[round(cost.cpu_s * 1e3, 2) for cost in ours],
        started_per_second=[round(each, 2) for each in started[0]],
    )


def _runc() -> str:
    said = subprocess.run([packages.runc(), "--version"], capture_output=True, text=True, check=True)
    return said.stdout.split()[2]
