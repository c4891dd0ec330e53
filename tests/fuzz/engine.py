"""Runs targets under libFuzzer, and reads what it says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.fuzz.catalogue import load
from tests.fuzz.target import FOUND, INPUT_S, MEMORY_MIB, dictionary, keep, seeds

PROJECT: Final = Path(__file__).resolve().parents[2]
WORK: Final = PROJECT / "build" / "fuzz"  # what runs have found so far, and what broke
_PROGRESS: Final = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)/")
_RUNS: Final = re.compile(r"^#(\d+)\s", re.MULTILINE)
_SLOWEST: Final = re.compile(r"stat::slowest_unit_time_sec:\s+(\d+)")
_PEAK: Final = re.compile(r"stat::peak_rss_mb:\s+(\d+)")


class FuzzRun(Struct, frozen=True):
    """What came of one run.

    edges: of nri_gpu's code that were reached. inputs: that were worth keeping. peak_mib: of memory. broke: the file
    with the input that broke the invariant, None where none did. ended: it ran to its end. said: the end of its output.
    """

    name: str
    executions: int
    seconds: float
    edges: int
    inputs: int
    peak_mib: int
    slowest_s: int
    broke: Path | None
    ended: bool
    said: str


def fuzz(name: str, seconds: float) -> FuzzRun:
    """Mutate what was found before, and what is kept, for so long or until something breaks."""
    found, broke = _folders(name)
    before = set(broke.iterdir())
    target = load(name)
    with _given(name) as (begin, pieces):
        flags = (
            f"-max_total_time={max(1, round(seconds))}",
            f"-max_len={target.bytes_max}",
            f"-dict={pieces}",
            f"-artifact_prefix={broke}/",
        )
        said = _run(name, (*flags, str(found), str(begin)))
    new = sorted(set(broke.iterdir()) - before)
    edges, inputs = _last(_PROGRESS, said, 2)
    return FuzzRun(
        name=name,
        executions=_last(_RUNS, said)[0],
        seconds=seconds,
        edges=edges,
        inputs=inputs,
        peak_mib=_last(_PEAK, said)[0],
        slowest_s=_last(_SLOWEST, said)[0],
        broke=new[0] if new else None,
        ended="\nDone " in said,
        said="\n".join(said.splitlines()[-60:]),
    )


def keep_found(name: str) -> str:
    """Keep the fewest inputs that reach all edges which anything found so far reaches. Returns what was done."""
    with tempfile.TemporaryDirectory() as folder, _given(name) as (begin, _):
        small = Path(folder)
        said = _run(name, ("-set_cover_merge=1", folder, str(WORK / name), str(begin)))
        fixed = {each for called, each in seeds(name, load(name)) if not called.startswith(Path(FOUND).stem)}
        inputs = [each for path in small.iterdir() if (each := path.read_bytes()) not in fixed]
    if "MERGE-OUTER: successful" not in said:  # which says how often it was started again
        return f"{name}: not merged\n{said[-2000:]}"
    path = keep(name, inputs)
    return f"{name}: {len(inputs)} inputs, {path.stat().st_size} bytes"


def _run(name: str, flags: Sequence[str]) -> str:
    limits = (f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MIB}", "-print_final_stats=1", "-verbosity=1")
    command = [sys.executable, "-m", "tests.fuzz.child", name, str(_folders(name)[1]), *limits, *flags]
    with tempfile.TemporaryDirectory(prefix="nri-gpu-fuzz-") as folder:  # libFuzzer ends without a chance to tidy up
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, check=False)
    said = done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    return f"{said}\nexit status {done.returncode}"


def _folders(name: str) -> tuple[Path, Path]:
    """Where what was found lies, and what broke."""
    folders = WORK / name, WORK / "broke" / name
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


@contextmanager
def _given(name: str) -> Iterator[tuple[Path, Path]]:
    """A folder with what a run begins with, and a file of pieces."""
    target = load(name)
    with tempfile.TemporaryDirectory() as folder:
        begin, pieces = Path(folder) / "begin", Path(folder) / "pieces"
        begin.mkdir()
        for called, each in seeds(name, target):
            (begin / called).write_bytes(each)
        pieces.write_text(dictionary(target.pieces))
        yield begin, pieces


def _last(pattern: re.Pattern[str], text: str, groups: int = 1) -> tuple[int, ...]:
    found = pattern.findall(text)
    if not found:
        return (0,) * groups
    return tuple(map(int, found[-1] if groups > 1 else found[-1:]))
