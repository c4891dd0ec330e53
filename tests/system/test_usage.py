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
# Says its CPU seconds and its largest resident KiB. ru_maxrss would have the memory of whoever started it, too.
MEASURED = """
import sys, time
from nri_gpu.cli.main import main

code = main(sys.argv[1:])
(line,) = (each for each in open("/proc/self/status") if each.startswith("VmHWM:"))
print(time.process_time(), line.split()[1], file=sys.stderr)
sys.exit(code)
"""


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
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "usage", *options], capture_output=True, check=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 40
    assert sum(int(line.split(",")[1]) for line in lines[1:]) == HOLDS * 250
    cpu_s, resident_kib = map(float, done.stderr.split())
    assert cpu_s < 2
    assert resident_kib * 1024 < 64 * MIB
