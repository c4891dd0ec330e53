"""A little of `make reliability`, so that its harness is known to work. What it finds is in docs/reliability.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.result import PROJECT
from tests.support.marks import on_newest


@on_newest
@pytest.mark.parametrize(("part", "case"), [("faults", "policy"), ("soak", "wire")])
def test_a_little_of_it(part: str, case: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("--quick", "--only", part, "--case", case, "--record", str(record))
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability", *options], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(record.read_text())["parts"][part]["rows"]
    assert row["passed"]
    assert row["count"] > 20
