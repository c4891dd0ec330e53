"""Stand-ins for NVIDIA's MPS programs, with the same command line, environment, pipes and control commands.

The control daemon listens in its pipe directory, writes NVIDIA's pid file there and what it was started with into its
log directory. Each client of a test is `nc`-free: a file in the shared memory that both sides see.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from nri_gpu.mps.process import process_of

CONTROL: Final = Path(__file__).with_name("mps_control.py")
SMI: Final = """#!/bin/sh
# -i UUID -c MODE: says what it was asked, and remembers it.
echo "$2 $4" >> {log}
"""


def install(root: Path, log: Path) -> Path:
    """Put them into a flat driver root in place of its own. log: what compute modes were set. Returns the root."""
    control = root / "bin/nvidia-cuda-mps-control"
    control.write_text(f"#!{sys.executable} -IS\n" + CONTROL.read_text())
    smi = root / "bin/nvidia-smi"
    smi.write_text(SMI.format(log=log))
    for program in (control, smi):
        program.chmod(0o755)
    return root


def noted_pid(state: Path, uuid: str) -> int:
    """The process of a GPU's daemon as it was noted; 0 where none lives."""
    with suppress(OSError, ValueError):
        pid, started = map(int, (state / "mps" / uuid / "daemon").read_text().split())
        process = process_of(pid)
        return pid if process and process.started == started else 0
    return 0


def end_all(state: Path) -> None:
    """Kill what a test left running."""
    for note in (state / "mps").glob("*/daemon"):
        if pid := noted_pid(state, note.parent.name):
            os.kill(pid, signal.SIGKILL)
