"""`nri-gpu cdi generate --watch`, as a service of an earlier version has it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.waiting import wait_for

WAIT_S: Final = 10.0


@pytest.mark.parametrize(("node", "names"), [(FOUR_GPUS.read_text(), 9), ("schema = 1\n[node]\n", 0)])
def test_a_service_that_watched_writes_once_and_stays(tmp_path: Path, node: str, names: int) -> None:
    """One that ended would be started again and again."""
    topology, file = tmp_path / "node.toml", tmp_path / "cdi/nri-gpu.json"
    topology.write_text(node)
    file.parent.mkdir()
    file.write_text('{"kind": "nvidia.com/gpu", "devices": "of yesterday"}')
    root = make_driver_root(tmp_path / "driver", "580.95.05")
    places = ["--driver-root", str(root), "--stage-dir", str(tmp_path / "stage"), "--gpus", str(topology)]
    command = ["cdi", "generate", *places, "--watch", "--log-level", "debug", "--output", str(file)]
    process = subprocess.Popen([sys.executable, "-m", "nri_gpu", *command], stderr=subprocess.PIPE, text=True)
    try:
        signals = Path(f"/proc/{process.pid}/status")
        wait_for(
            "sigwait, which lets through what it waits for",
            lambda: "SigBlk:\t0000000000000001" in signals.read_text(),
            WAIT_S,
        )
        written = len(json.loads(file.read_text())["devices"]) if file.exists() else 0
        process.send_signal(signal.SIGHUP)
        process.terminate()
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, written) == (Exit.OK, names)
    assert "enable nri-gpu-cdi.path" in log
