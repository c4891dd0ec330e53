"""What a part of the record says, and the file that keeps it: docs/records/reliability.json."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.system.storage import write_whole

PROJECT: Final = Path(__file__).resolve().parents[2]
RECORD: Final = PROJECT / "docs" / "records" / "reliability.json"
SCHEMA: Final = "nri-gpu/reliability/v1"
POINTS: Final = 200  # of a series that is kept


class PartName(StrEnum):
    """What can be run alone, in the order of the page."""

    FUZZ = "fuzz"
    HOSTILE = "hostile"
    FAULTS = "faults"
    SOAK = "soak"


class Row(Struct, frozen=True):
    """One attack. count: how many of `unit`; outcome: what came of them; command: repeats it; numbers: for plots."""

    what: str
    count: int
    unit: str
    outcome: str
    command: str
    passed: bool
    numbers: Mapping[str, float] = {}


class Series(Struct, frozen=True):
    """Samples over a run. unit, x_unit: of y and x; a name is unique in its part."""

    name: str
    x_unit: str
    unit: str
    x: Sequence[float]
    y: Sequence[float]

    def thinned(self, points: int = POINTS) -> Series:
        """The same with at most so many points: every n-th, and the last."""
        step = max(1, -(-len(self.x) // points))
        if step == 1:
            return self
        return replace(self, x=[*self.x[:-1:step], self.x[-1]][-points:], y=[*self.y[:-1:step], self.y[-1]][-points:])


class Fact(Struct, frozen=True):
    """What else the part ran on, such as `containerd` and its versions."""

    name: str
    value: str


Found = Row | Series | Fact


class Options(Struct, frozen=True):
    """How much is done. quick: as little as shows that it works. fuzz_s: seconds for each target. seed: of all dice.

    case: the only row of its part, by its name on the command line; empty for all.
    """

    quick: bool = False
    fuzz_s: float = 60.0
    seed: int = 15
    case: str = ""


class Part(Struct, frozen=True):
    """A part's last run. date: ISO; took_s: seconds; machine: what it ran on, by name."""

    date: str
    took_s: float
    machine: Mapping[str, str]
    rows: Sequence[Row]
    series: Sequence[Series] = ()

    def amended(self, by: Part) -> Part:
        """With what a later run of some cases found in place of what they found before."""
        again = {row.command for row in by.rows}
        first = next((at for at, row in enumerate(self.rows) if row.command in again), len(self.rows))
        rows = [row for row in self.rows if row.command not in again]
        series = {each.name: each for each in (*self.series, *by.series)}
        return replace(
            by,
            took_s=round(self.took_s + by.took_s, 1),
            machine={**self.machine, **by.machine},
            rows=[*rows[:first], *by.rows, *rows[first:]],
            series=[*series.values()],
        )


class Record(Struct, frozen=True):
    """All parts, by name. A part that never ran is missing."""

    schema: str = SCHEMA
    parts: Mapping[PartName, Part] = {}

    def including(self, name: PartName, part: Part) -> Record:
        """With that part in place of its last run."""
        parts = {**self.parts, name: part}
        return replace(self, parts={each: parts[each] for each in PartName if each in parts})


def read(path: Path = RECORD) -> Record:
    """The record in that file; an empty one where there is none. Raises: msgspec.ValidationError."""
    return msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else Record()


def write(record: Record, path: Path = RECORD) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", 0o644)


def machine() -> dict[str, str]:
    """Where this runs, without the machine's name, and how much else ran there."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "kernel": platform.release().split("-")[0],
        "cores": str(os.cpu_count()),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "python": platform.python_version(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
