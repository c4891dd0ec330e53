"""`nri-gpu usage` on a long record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.ledger.holds import End, holds_of
from nri_gpu.records.usage_lines import HoldEnded, LogMoment, begun_line, device_of, encoded
from nri_gpu.records.usage_log import FILE
from tests.support import builders as make

HOLDS = 100_000
MIB = 2**20


def test_a_year_of_a_busy_node_is_summed_up_in_two_seconds_and_64_mib(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may read who had which GPU")
    gpus, at_s = make.gpus(8), 1_700_000_000.0
    with (tmp_path / FILE).open("wb") as file:
        for number in range(HOLDS):
            gpu, pod = gpus[number % 8], make.pod(f"job-{number}", namespace=f"team-{number % 40}")
            (hold,) = holds_of(make.ledger(make.entry_of(gpu.uuid, to=make.container(of=pod)))).values()
            begun = begun_line(
                hold,
                {gpu.uuid: device_of(gpu)},
                number * 300.0,
                "boot",
                LogMoment(number * 300.0, at_s + number * 300.0),
            )
            end_s = number * 300.0 + 250.0
            over = HoldEnded(boot="boot", at_s=at_s + end_s, mono_s=end_s, hold=begun.hold, why=End.ENDED)
            file.write(encoded(begun) + encoded(over))
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[usage]\ndir = "{tmp_path}"\n')
    options = ("--policy", str(policy), "--state-dir", str(tmp_path), "--csv")
    command = [sys.executable, "-m", "nri_gpu", "usage", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = process.stdout.read().splitlines()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert len(lines) == 1 + 40
    assert sum(int(line.split(",")[1]) for line in lines[1:]) == HOLDS * 250
    assert used.ru_utime + used.ru_stime < 2
    assert used.ru_maxrss * 1024 < 64 * MIB
