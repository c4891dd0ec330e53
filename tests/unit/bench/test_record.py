"""The record of the bench: its file, the tables made of it, and what contenders from outside are given."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from bench.contenders import BARE, EIGHT, HOOKS, HOOKS_OF_NVIDIA, NODES, injected, server_driver, specify
from bench.figures import Ratio
from bench.record import Comparison, LeftOut, Measured, Record, compared, lines, read, rendered, write
from tests.support.errors import HarnessError

PAGE = "# Cost\n\n<!-- record: contenders -->\nold\n<!-- end -->\n\n<!-- record: budget -->\n<!-- end -->\n"
README = "<!-- record: summary -->\n<!-- end -->\n<!-- record: figure -->\n<!-- end -->\n"


def measured(name: str, ms: float, started: float, hooks: int = 0) -> Measured:
    times = [ms, ms * 2, ms * 3]
    one = Ratio(1.0, 0.0)
    return Measured(name, 11, 1, hooks, one, one, one, times, times, [started] * 3)


RECORD = Record(
    date="2026-11-22 21:00 UTC",
    took_s=60,
    machine={"cores": "2", "load before": "0.1"},
    rounds=3,
    jobs=8,
    share_percent=2.5,
    contenders=[measured(BARE, 40, 30), measured(EIGHT, 44, 24), measured(HOOKS, 88, 15, hooks=6)],
    left_out=[LeftOut("another", "--another FILE")],
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(RECORD, file := tmp_path / "records" / "performance.json")
    assert read(file) == RECORD
    # One line a contender, so that a change of one is a change of one line.
    assert [line[:9] for line in file.read_text().splitlines()].count('{"name":"') == 4


def test_a_record_of_another_shape_is_not_read(tmp_path: Path) -> None:
    (file := tmp_path / "performance.json").write_text('{"schema":"nri-gpu/performance/v1","contenders":{}}')
    with pytest.raises(msgspec.ValidationError):
        read(file)


def test_rounds_are_compared_one_by_one_with_their_budget() -> None:
    found = {(pair.theirs, pair.of): (ratio.median, pair.mark(ratio.median)) for pair, ratio in compared(RECORD)}
    assert found == {
        (BARE, "wall_ms"): (1.1, "must 1.15, aim 1.10: aim met"),
        (HOOKS, "wall_ms"): (0.5, "must 0.53, aim 0.50: aim met"),
        (HOOKS, "cpu_ms"): (0.5, "must 0.53, aim 0.50: aim met"),
        (HOOKS, "started_per_second"): (1.6, "must 1.80, aim 2.00: **not met**"),
    }
    assert Comparison(EIGHT, BARE, must=1.15, aim=1.10).mark(1.12).endswith(": met")
    assert Comparison(EIGHT, BARE).mark(9.0) == ""


def test_the_tables_of_the_page_are_made_of_the_record() -> None:
    made = rendered(PAGE, RECORD)
    assert rendered(made, RECORD) == made
    page = made.replace("\N{NO-BREAK SPACE}", " ")
    assert "old" not in page
    assert f"| {HOOKS} (11 nodes, 1 mount, 6 hooks) | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 |" in page
    assert f"| {EIGHT} | {HOOKS} | started per second | 1.60 ± 0.00 | must 1.80, aim 2.00: **not met** |" in page
    assert "Left out: another: --another FILE." in page
    summary = rendered(README, RECORD).replace("\N{NO-BREAK SPACE}", " ")
    # No row of a contender that was left out.
    assert [line for line in summary.splitlines() if line.startswith("| a")] == [
        "| a container with 8 GPUs | 1.10 ± 0.00 |"
    ]
    figure = " ".join(summary.split())
    assert "**8 GPUs: create + start in 0.50 of the time of CDI with NVIDIA's hooks**, in 0.50 of the CPU" in figure
    assert (
        "1.6 times as many containers started per second. 3 rounds with simulated GPUs on 2026-11-22: cores 2."
        in figure
    )
    assert "8 GPUs" not in rendered(README, replace(RECORD, contenders=RECORD.contenders[:1]))
    assert "Left out: another: --another FILE" in list(lines(RECORD))


def test_the_injector_is_told_of_a_server_driver_file_by_file(tmp_path: Path) -> None:
    driver = server_driver(tmp_path / "driver")
    (text,) = injected(driver).values()
    adjustment = json.loads(text)
    devices, mounts = adjustment["linux"]["devices"], adjustment["mounts"]
    assert [each["path"] for each in devices] == [f"/dev/{name}" for name in NODES]
    assert len(mounts) == 36  # as many as `nvidia-ctk cdi generate` finds in it
    assert all(Path(each["source"]).is_file() for each in mounts)
    assert len({each["destination"] for each in mounts}) == 36


def nvidia_ctk(folder: Path, script: str) -> Path:
    """A stand-in for the tool. script: of a shell, where `$file` is what it has to write."""
    (program := folder / "nvidia-ctk").write_text(f"#!/bin/sh\nfor file; do :; done\n{script}\n")
    program.chmod(0o755)
    return program


def written(*hooks: str) -> str:
    """A script that writes a specification with these hooks."""
    edits = {
        "hooks": [{"hookName": "createContainer", "path": "/x/nvidia-cdi-hook", "args": ["x", hook]} for hook in hooks]
    }
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "containerEdits": edits}
    gpu = {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    return f"echo '{json.dumps(document | {'devices': [gpu]})}' > $file"


def test_a_specification_of_the_toolkit_has_all_its_hooks(tmp_path: Path) -> None:
    program, file = nvidia_ctk(tmp_path, written(*HOOKS_OF_NVIDIA)), tmp_path / "nvidia.json"
    assert specify(program, tmp_path, tmp_path / "hook", file) == file


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no NVML >&2; exit 1", "cdi generate failed: no NVML"),
        (written(*HOOKS_OF_NVIDIA).replace("containerEdits", "edits"), "is no CDI specification"),
        (written(*HOOKS_OF_NVIDIA - {"update-ldcache"}), "no hooks for update-ldcache"),
    ],
)
def test_what_is_no_specification_of_the_toolkit_is_a_sentence(tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        specify(nvidia_ctk(tmp_path, script), tmp_path, tmp_path / "hook", tmp_path / "nvidia.json")
