"""`make reliability`: attack the program in every way that the record lists, and keep what came of it.

    python -m tests.reliability [--only fuzz|hostile|faults|soak] [--quick] [--record FILE]

A full run of a part replaces that part of docs/records/reliability.json and of the tables in docs/reliability.md. A
quick one, which only shows that the harness works, writes nothing unless a file is named. Exit code 1: a row failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tests.reliability import faults, fuzzing, hostile_runtime, page, soak
from tests.reliability.result import RECORD, Fact, Found, Options, Part, PartName, Row, Series, machine, read, write

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
    parser.add_argument("--only", type=PartName, action="append", choices=tuple(PartName), help="one part; repeatable")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--fuzz-seconds", type=float, default=Options().fuzz_s, help="for each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=Options().seed, help="to repeat a run (%(default)s)")
    parser.add_argument(
        "--case",
        default="",
        help="of one part, one row alone, by its name; the record changes only where --record names it",
    )
    parser.add_argument("--record", type=Path, help=f"where to keep it; {RECORD.name} for a full run")
    given = parser.parse_args()
    _mount_privately()
    options = Options(quick=given.quick, fuzz_s=given.fuzz_seconds, seed=given.seed, case=given.case)
    to = given.record or (None if options.quick or options.case else RECORD)
    passed = True
    for name in given.only or PARTS:
        part = run(name, options)
        passed &= all(row.passed for row in part.rows)
        if to:
            record = read(to)
            last = record.parts.get(name) if options.case else None
            write(record.including(name, last.amended(part) if last else part), to)
    if to == RECORD:
        page.render()
    return 0 if passed else 1


def _mount_privately() -> None:
    """Become the same in a mount namespace of our own, which takes what we mount with it however we end."""
    if not os.geteuid() and ALONE not in os.environ:
        again = [sys.executable, "-m", "tests.reliability", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", "--mount", "--propagation", "slave", "--", *again], os.environ | {ALONE: "1"})


def run(name: PartName, options: Options) -> Part:
    """Run a part, and print its rows as they come."""
    print(f"\n{name}\n", flush=True)
    began, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    rows, series, facts = list[Row](), list[Series](), machine()
    for found in PARTS[name](options):
        match found:
            case Series():
                series.append(found.thinned())
            case Fact():
                facts[found.name] = found.value
            case Row():
                rows.append(found)
                print(page.line(found), flush=True)
    return Part(date, round(time.monotonic() - began, 1), facts, rows, series)


if __name__ == "__main__":
    sys.exit(main())
