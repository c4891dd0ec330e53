"""Sockets in the sandbox of nri-gpu.service."""

from __future__ import annotations

import subprocess
import sys


def test_the_unit_lets_no_network_in() -> None:
    command = [sys.executable, "-m", "tests.system.confined_sockets"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
