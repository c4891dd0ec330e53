"""The file that the guard keeps; a guard that ended is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.plugin.guard_status import (
    STATUS_FILE,
    GuardStatus,
    process_started,
    read_guard_status,
    write_guard_status,
)

MINE = GuardStatus(pid=os.getpid(), started=process_started(os.getpid()), connected=True, runtime="containerd")


def test_a_guard_that_ended_is_none(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = replace(MINE, pid=ended.pid, started=process_started(ended.pid))
    write_guard_status(tmp_path / "guard", seen)
    assert (tmp_path / "guard" / STATUS_FILE).stat().st_mode & 0o777 == 0o644
    assert read_guard_status(tmp_path / "guard") == seen
    ended.communicate(b"\n")
    assert read_guard_status(tmp_path / "guard") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "x"}', '{"schema": "x", "pid": "y", "started": "z"}'])
def test_a_file_of_somebody_else(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    assert read_guard_status(tmp_path) is None


def test_a_newer_guards_file_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    write_guard_status(tmp_path, MINE)
    raw = json.loads((tmp_path / STATUS_FILE).read_text())
    assert raw["schema"] == "nri-gpu/guard/v1"
    (tmp_path / STATUS_FILE).write_text(json.dumps({**raw, "later": 1}))
    assert read_guard_status(tmp_path) == MINE
