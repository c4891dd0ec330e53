"""What the tests found on a machine with GPUs: as JSON, as a table, and in docs/compatibility.md.

python -m tests.gpu.report JUNIT [--out DIR]   make DIR/real-gpu.json and DIR/real-gpu.md, and print the latter
python -m tests.gpu.report --take FILE         keep such a real-gpu.json as the record, and put it into the page
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import msgspec
from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.errors import Exit
from tests.gpu.compare import ask_ours
from tests.gpu.conftest import driver_root
from tests.support import packages
from tests.support.errors import HarnessError
from tests.support.records import filled, marked

PROJECT: Final = Path(__file__).parents[2]
RECORD: Final = PROJECT / "docs" / "records" / "real-gpu.json"
PAGE: Final = PROJECT / "docs" / "compatibility.md"
SCHEMA: Final = "nri-gpu/real-gpu/v1"
NONE_YET: Final = "None yet: **these tests have not run on a GPU so far.**\n"
SAID_CHARACTERS: Final = 300  # of a failure


class Outcome(StrEnum):
    """Of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Row(Struct, frozen=True):
    """One test, by its sentence. said: what it recorded, why it was skipped, or how it failed. took_s: seconds."""

    test: str
    outcome: Outcome
    said: str
    took_s: float


class Report(Struct, frozen=True):
    """date: of the run, as 2026-11-22. machine: what it is -> which one."""

    schema: str
    date: str
    machine: Mapping[str, str]
    rows: Sequence[Row]

    def count(self, outcome: Outcome) -> int:
        return sum(row.outcome is outcome for row in self.rows)


def rows_of(junit: str) -> Iterator[Row]:
    """From pytest's JUnit file, of junit_family xunit1. Raises: ElementTree.ParseError."""
    for case in ElementTree.fromstring(junit).iter("testcase"):
        found = [each.get("value", "") for each in case.iterfind("properties/property[@name='found']")]
        outcome, said = Outcome.PASSED, " ".join("; ".join(found).split())
        for tag, other in {"skipped": Outcome.SKIPPED, "error": Outcome.FAILED, "failure": Outcome.FAILED}.items():
            if (element := case.find(tag)) is not None:
                outcome, said = other, " ".join(element.get("message", "").split())[:SAID_CHARACTERS]
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        yield Row(name, outcome, said, round(float(case.get("time", "0")), 1))


def machine() -> dict[str, str]:
    """What the tests ran on."""
    found = {"GPUs": "none", "driver": "none"}
    try:
        ours = ask_ours(driver_root())
    except ValueError:  # no NVML: the verb said so on stderr
        pass
    else:
        models = [gpu["model"] for gpu in ours["gpus"]]
        counted = {f"{models.count(model)} x {model}": None for model in models}
        found = {"GPUs": ", ".join(counted) or ours["fault"] or "none"}
        found |= {"driver": ours["driver_version"] or "unknown", "CUDA": ours["cuda_version"] or "unknown"}
    release = platform.freedesktop_os_release()
    found |= {"system": release.get("PRETTY_NAME", release["ID"]), "kernel": os.uname().release}
    found |= {"Python": platform.python_version(), "nri-gpu": __version__}
    try:
        said = subprocess.run([packages.runc(), "--version"], capture_output=True, text=True, check=False).stdout
        found |= {"containerd": packages.find_any().release, "runc": said.partition("\n")[0].rpartition(" ")[2]}
    except HarnessError as fault:
        found["containerd"] = str(fault)
    return found


def markdown(report: Report) -> str:
    """A sentence on the machine, and a row for each test."""
    ran = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome)
    lines = [f"Run on {report.date}: {ran}.", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {_cell(which)} |" for what, which in report.machine.items()]
    lines += ["", "| test | outcome | seconds | found |", "|---|---|---|---|"]
    for row in report.rows:
        mark = f"**{row.outcome}**" if row.outcome is Outcome.FAILED else row.outcome
        lines.append(f"| {_cell(row.test)} | {mark} | {row.took_s:g} | {_cell(row.said)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def code_of(report: Report) -> Exit:
    """A failure counts most; a report of skipped tests alone proves nothing."""
    if report.count(Outcome.FAILED):
        return Exit.FINDING
    return Exit.OK if report.count(Outcome.PASSED) else Exit.UNAVAILABLE


def rendered(page: str, record: Path = RECORD) -> str:
    """The page with the record's table in it. Raises: ValueError: it has no markers, or the record is none."""
    if "gpu" not in marked(page):
        raise ValueError(f"{PAGE.name} has no markers for the record")
    table = markdown(read(record)) if record.exists() else NONE_YET
    return filled(page, lambda _: table)


def read(path: Path) -> Report:
    """Raises: OSError, msgspec.ValidationError, ValueError: it is no such report."""
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    if report.schema != SCHEMA:
        raise ValueError(f"{path} has schema {report.schema}, and {SCHEMA} is wanted")
    return report


def take(file: Path, record: Path = RECORD, page: Path = PAGE) -> None:
    """Keep a report as the record. Raises: OSError, ValueError: it is none, or no test of it ran."""
    report = read(file)
    if not report.count(Outcome.PASSED) + report.count(Outcome.FAILED):
        raise ValueError(f"{file} is no record: every test was skipped")
    write(report, record)
    page.write_text(rendered(page.read_text(), record))


def write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Report or take. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.report", description=__doc__)
    parser.add_argument("junit", type=Path, nargs="?", help="what pytest --junitxml wrote")
    parser.add_argument("--out", type=Path, default=PROJECT / "build", help="folder for both files (default build)")
    parser.add_argument("--take", type=Path, metavar="FILE", help="a real-gpu.json that was brought back")
    options = parser.parse_args(arguments)
    if options.take:
        try:
            take(options.take)
        except (OSError, ValueError) as fault:
            print(fault, file=sys.stderr)
            return Exit.FINDING
        return Exit.OK
    if options.junit is None:
        parser.error("name pytest's JUnit file, or say --take")
    rows = list(rows_of(options.junit.read_text()))
    report = Report(SCHEMA, datetime.now(UTC).date().isoformat(), machine(), rows)
    write(report, options.out / "real-gpu.json")
    (options.out / "real-gpu.md").write_text(markdown(report))
    print(markdown(report))
    return code_of(report)


if __name__ == "__main__":
    sys.exit(main())
