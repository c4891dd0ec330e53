"""Throw garbage at every untrusted entrance, guided by which code it reaches.

    python -m tests.fuzz [NAME ...] [--seconds 60] [--jobs N] [--keep]

What is found stays in build/fuzz, so the next run goes on from there. An input that breaks an invariant lies in
build/fuzz/broke: mend the bug, and copy the input to tests/fuzz/corpus/<target>/ under a name that says what it did.
--keep makes what was found small and puts it into tests/fuzz/corpus. Exit code 1: an invariant was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.catalogue import NAMES
from tests.fuzz.engine import FuzzRun, fuzz, keep_found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="only put what was found into the corpus")
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    names = given.names or NAMES
    with ThreadPoolExecutor(given.jobs) as pool:
        if given.keep:
            for said in pool.map(keep_found, names):
                print(said, flush=True)
            return 0
        return 1 if any([_show(run) for run in pool.map(lambda name: fuzz(name, given.seconds), names)]) else 0


def _show(run: FuzzRun) -> bool:
    """Print it. Returns whether something broke."""
    numbers = f"{run.executions:>10,} inputs, {run.edges:>5,} edges, {run.inputs:>4,} found, {run.peak_mib} MiB"
    print(
        f"{run.name:<14} {numbers}{f', BROKEN by {run.broke}' if run.broke else '' if run.ended else ', FAILED'}",
        flush=True,
    )
    if run.broke or not run.ended:
        print(run.said, file=sys.stderr, flush=True)
    return run.broke is not None or not run.ended


if __name__ == "__main__":
    sys.exit(main())
