"""Every fuzz target (`tests/fuzz`) under libFuzzer for its time: how many inputs, what they reached, what broke."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from tests.fuzz.catalogue import ENTRANCES, NAMES
from tests.fuzz.engine import FuzzRun, fuzz
from tests.fuzz.target import kept
from tests.reliability.result import Fact, Found, Options, Row
from tests.support import cleanup

QUICK_S: Final = 5.0


def found(options: Options) -> Iterator[Found]:
    """A row for each target. As many run at a time as there are processors."""
    yield Fact("atheris", importlib.metadata.version("atheris"))
    seconds = QUICK_S if options.quick else options.fuzz_s
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for run in pool.map(lambda name: fuzz(name, seconds), [options.case] if options.case else NAMES):
                yield _row(run)
        finally:
            for pid in cleanup.descendants(os.getpid()):  # only where we are interrupted
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)


def _row(run: FuzzRun) -> Row:
    corpus = sum(1 for _ in kept(run.name))
    outcome = f"{run.edges:,} edges of nri_gpu reached, {run.peak_mib} MiB at most; {corpus} inputs are kept"
    if run.broke:
        outcome = f"broken by {run.broke}"
    elif not run.ended:
        outcome = f"libFuzzer did not run to its end: {'; '.join(run.said.splitlines()[-3:])}"
    return Row(
        what=f"{run.name}: {ENTRANCES[run.name].what}",
        count=run.executions,
        unit="inputs",
        outcome=outcome,
        command=f"python -m tests.reliability --only fuzz --case {run.name} --fuzz-seconds {run.seconds:.0f}",
        passed=run.ended and run.broke is None,
        numbers={
            "seconds": run.seconds,
            "edges": run.edges,
            "found": run.inputs,
            "kept": corpus,
            "peak_mib": run.peak_mib,
            "slowest_s": run.slowest_s,
        },
    )
