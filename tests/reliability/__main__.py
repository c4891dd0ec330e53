"""`make reliability`: attack the program in every way that the record lists, and keep what came of it.

    python -m tests.reliability --only fuzz|hostile|faults|soak [--case ROW] [--quick] [--record FILE]

Rows are printed as they come. A part that reaches its end replaces its last run in docs/records/reliability.json and in
the tables of docs/reliability.md. A quick run, which only shows that the harness works, and one of a single row write
nothing unless a file is named. Exit code 1: a row failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from tests.reliability import faults, fuzzing, hostile_runtime, page, soak
from tests.reliability.result import RECORD, Fact, Found, Options, Part, PartName, Row, Series, machine, read, write
from tests.support import cleanup

ALONE: Final = "NRI_GPU_RELIABILITY_MOUNTS"
# Where each part lies: a function that yields what it finds, as it finds it.
PARTS: Final[Mapping[PartName, Callable[[Options], Iterator[Found]]]] = {
    PartName.FUZZ: fuzzing.found,
    PartName.HOSTILE: hostile_runtime.found,
    PartName.FAULTS: faults.found,
    PartName.SOAK: soak.found,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=PartName, choices=tuple(PartName), required=True, help="the part")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--fuzz-seconds", type=float, default=Options().fuzz_s, help="for each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=Options().seed, help="to repeat a run (%(default)s)")
    parser.add_argument("--case", default="", help="one row alone, by its name")
    parser.add_argument("--record", type=Path, help=f"where to keep it; {RECORD.name} for a full run")
    given = parser.parse_args()
    options = Options(quick=given.quick, fuzz_s=given.fuzz_seconds, seed=given.seed, case=given.case)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _mount_privately()
    cleanup.sweep()  # what a run that was killed left behind
    return attack(given.only, options, given.record or (None if options.quick or options.case else RECORD))


def _mount_privately() -> None:
    """Become the same in a mount namespace of our own, which takes what we mount with it however we end."""
    if not os.geteuid() and ALONE not in os.environ:
        again = [sys.executable, "-m", "tests.reliability", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", "--mount", "--propagation", "slave", "--", *again], os.environ | {ALONE: "1"})


def attack(name: PartName, options: Options, to: Path | None) -> int:
    """Run a part, print its rows as they come, and keep them. Returns the exit code."""
    began, part = time.monotonic(), Part(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), 0.0, machine(), ())
    for found in PARTS[name](options):
        match found:
            case Series():
                part = replace(part, series=[*part.series, found.thinned()])
            case Fact():
                part = replace(part, machine={**part.machine, found.name: found.value})
            case Row():
                part = replace(part, rows=[*part.rows, found])
                print(page.line(found), flush=True)
    part = replace(part, took_s=round(time.monotonic() - began, 1))
    if to:
        last = read(to).parts.get(name)
        write(read(to).including(name, last.amended(part) if last and options.case else part), to)
    if to == RECORD:
        page.render()
    return int(not all(row.passed for row in part.rows))


if __name__ == "__main__":
    sys.exit(main())
