"""A little of `make reliability`, so that its harness is known to work. What it finds is in docs/reliability.md."""

import json
import subprocess
import sys
from pathlib import Path

from tests.reliability import faults
from tests.reliability.result import PROJECT, Options, Row
from tests.support.marks import on_newest


@on_newest
def test_a_soak_is_written_down(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("--quick", "--only", "soak", "--case", "wire", "--record", str(record))
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability", *options], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(record.read_text())["parts"]["soak"]["rows"]
    assert row["passed"]
    assert row["count"] >= 500


@on_newest
def test_a_fault_while_containers_are_created() -> None:
    found = faults.found(Options(quick=True, case="policy"))
    [row] = [each for each in found if isinstance(each, Row)]
    assert row.passed, row.outcome
    assert row.count >= 2 * faults.QUICK_CREATES
