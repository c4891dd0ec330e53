"""What `check` says of the guard, from the file that the guard keeps; a guard that ended is none."""

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
    guard_advice,
    process_started,
    read_guard_status,
    write_guard_status,
)
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import PluginSettings

MINE = GuardStatus(pid=os.getpid(), started=process_started(os.getpid()), connected=True, runtime="containerd")


def said(tmp_path: Path, seen: GuardStatus | None) -> tuple[str, ...]:
    if seen:
        write_guard_status(tmp_path / "guard", seen)
    return guard_advice(Policy(), served=True, run_dir=tmp_path / "guard")


def test_all_is_well_and_where_nri_gpu_never_served_none_is_needed(tmp_path: Path) -> None:
    assert guard_advice(Policy(), served=False, run_dir=tmp_path / "guard") == ()
    assert said(tmp_path, MINE) == ()
    assert (tmp_path / "guard" / STATUS_FILE).stat().st_mode & 0o777 == 0o644


SAID = {
    "none": (None, "systemctl enable --now nri-gpu-guard"),
    "its pid is somebody else's by now": (replace(MINE, started="1"), "no guard runs"),
    "not connected": (replace(MINE, connected=False), f"the guard (pid {os.getpid()}) is not connected"),
    "found something": (replace(MINE, ungranted=3), "3 containers ran without the GPUs they asked for"),
}


@pytest.mark.parametrize(("seen", "sentence"), SAID.values(), ids=SAID)
def test_what_an_operator_is_told(tmp_path: Path, seen: GuardStatus | None, sentence: str) -> None:
    (only,) = said(tmp_path, seen)
    assert sentence in only


def test_a_guard_that_ended_is_none(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = replace(MINE, pid=ended.pid, started=process_started(ended.pid))
    assert said(tmp_path, seen) == ()
    ended.communicate(b"\n")
    assert "no guard runs" in said(tmp_path, None)[0]


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


def test_a_guard_that_comes_first() -> None:
    (order,) = guard_advice(Policy(plugin=PluginSettings(index="90")), served=False)
    assert 'guard.index = "90" is not behind plugin.index = "90"' in order
