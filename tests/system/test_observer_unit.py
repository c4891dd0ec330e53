"""The observer in its unit's sandbox: what looks sees all users' processes, what lives on lays its rights aside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support import sandbox
from tests.support.daemon import Launch
from tests.support.holding import FULL, MAJOR, holding
from tests.support.observer import Observing
from tests.support.unit_file import OURS
from tests.system.test_process_scan import NO_ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of namespaces needs root")

UNIT: Final = OURS.with_name("nri-gpu-observe.service")


class SandboxedObserver(Observing):
    """An observer in the sandbox of its unit."""

    def program(self) -> list[str]:
        self.launch.state.mkdir(exist_ok=True)
        return sandbox.command(super().program(), rw=[self.launch.state], keep=[self.launch.base], unit=UNIT)


def test_it_observes_from_inside_without_its_rights(folder: Path) -> None:
    with SandboxedObserver(Launch(folder, folder / "no-runtime")) as observer:
        observer.wait_looked()
        status = Path(f"/proc/{observer.pid}/status").read_text()
        assert "CapEff:\t0000000000000000\n" in status
        assert "CapPrm:\t0000000000080004\n" in status  # SYS_PTRACE and DAC_READ_SEARCH, for the child that looks
        assert "not set aside" not in observer.log()
        assert observer.folder.stat().st_mode & 0o777 == 0o700


def test_a_look_from_inside_finds_another_users_process(tmp_path: Path) -> None:
    """The child needs no system call that the unit takes away."""
    with holding(tmp_path, FULL, script=NO_ROOT) as process:
        look = [sys.executable, "-I", "-m", "nri_gpu.stray.process_scan", "0", str(MAJOR)]
        found = subprocess.check_output(sandbox.command(look, unit=UNIT), cwd=sandbox.PROJECT, text=True, timeout=60)
    assert f'"pid":{process.pid},' in found
