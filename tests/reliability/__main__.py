"""`make reliability`: attack the program in every way that the record lists, and keep what came of it.

    python -m tests.reliability [--only fuzz|hostile|faults|soak] [--quick] [--record FILE]

A full run of a part replaces that part of docs/records/reliability.json and of the tables in docs/reliability.md. A
quick one, which only shows that the harness works, writes nothing unless a file is named. Several parts run one after
the other, each in a process of its own. Rows are kept as they come, so that a part that is interrupted or killed keeps
those that it has, beside the older ones; the parts after a killed one run all the same. At the end the tables are
printed. Exit code 1: a row failed, or a part did not reach its end; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from tests.reliability import faults, fuzzing, hostile_runtime, page, soak
from tests.reliability.result import RECORD, Fact, Found, Options, Part, PartName, Row, Series, machine, read, write
from tests.support import cleanup

ALONE: Final = "NRI_GPU_RELIABILITY_MOUNTS"
INTERRUPTED: Final = 128 + signal.SIGINT
TIDY_S: Final = 120.0  # for a part that was interrupted, to take away what it made
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
    options = Options(quick=given.quick, fuzz_s=given.fuzz_seconds, seed=given.seed, case=given.case)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = given.only or [*PARTS]
    if len(parts) > 1 and options.case:
        parser.error("--case is of one part: name it by --only")
    to = given.record or (None if options.quick or options.case else RECORD)
    if len(parts) > 1:
        return one_after_the_other(parts, options, to)
    _mount_privately()
    return attack(parts[0], PARTS[parts[0]](options), options, to)


def _mount_privately() -> None:
    """Become the same in a mount namespace of our own, which takes what we mount with it however we end."""
    if not os.geteuid() and ALONE not in os.environ:
        again = [sys.executable, "-m", "tests.reliability", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", "--mount", "--propagation", "slave", "--", *again], os.environ | {ALONE: "1"})


def one_after_the_other(parts: Sequence[PartName], options: Options, to: Path | None) -> int:
    """Run parts as processes, whatever becomes of each, and print their tables. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="rel-") as folder:  # short: sockets are made below it
        record = to or Path(folder, "record.json")
        ended: dict[PartName, int] = {}
        for part in parts:
            ended[part] = _process(part, options, record, folder)
            if ended[part] < 0:
                print(f"\n{part}: killed by signal {-ended[part]}; the rows that it had are kept", file=sys.stderr)
                cleanup.sweep()
            if ended[part] == INTERRUPTED:
                break
        if record == RECORD:
            page.render()
        for part in ended:
            if found := read(record).parts.get(part):
                print(f"\n## {part}\n\n" + "\n".join(page.table(found)), flush=True)
    return INTERRUPTED if INTERRUPTED in ended.values() else int(any(ended.values()))


def _process(part: PartName, options: Options, record: Path, folder: str) -> int:
    """Run one part to its end. Returns its exit code; -9 where SIGKILL ended it. folder: for its temporary files."""
    arguments = ["--only", part, "--fuzz-seconds", f"{options.fuzz_s:g}", "--seed", str(options.seed)]
    arguments += ["--record", str(record), *(["--quick"] if options.quick else [])]
    command = [sys.executable, "-m", "tests.reliability", *arguments]
    # In a group of its own: a terminal's Ctrl-C comes to us alone, and the part is told once, so that it can tidy up.
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": folder}, process_group=0) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(TIDY_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return INTERRUPTED


def attack(name: PartName, source: Iterator[Found], options: Options, to: Path | None) -> int:
    """Run a part, print its rows as they come, and keep them. Returns the exit code."""
    print(f"\n{name}\n", flush=True)
    last = read(to).parts.get(name) if to else None
    began, part = time.monotonic(), Part(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), 0.0, machine(), ())
    code = 0
    try:
        for found in source:
            part = replace(_with(part, found), took_s=round(time.monotonic() - began, 1))
            if isinstance(found, Row):
                print(page.line(found), flush=True)
                _keep(name, part.unfinished(last), to)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # of the harness or of the machine: the rows before it are worth keeping
        traceback.print_exc()
        code = 1
    if not code:
        _keep(name, last.amended(part) if last and options.case else part, to)
    if to == RECORD:
        page.render()
    return code or int(not all(row.passed for row in part.rows))


def _with(part: Part, found: Found) -> Part:
    match found:
        case Series():
            return replace(part, series=[*part.series, found.thinned()])
        case Fact():
            return replace(part, machine={**part.machine, found.name: found.value})
        case Row():
            return replace(part, rows=[*part.rows, found])


def _keep(name: PartName, part: Part, to: Path | None) -> None:
    if to:
        write(read(to).including(name, part), to)


if __name__ == "__main__":
    sys.exit(main())
