"""The units that keep the CDI specification true: they agree with the verb, explain themselves, and stay tight."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.cdi.file import STANDARD, SUFFIXES
from nri_gpu.cli.cdi import DEFAULT_STAGE
from nri_gpu.cli.main import VERBS
from nri_gpu.daemon.policy_file import DEFAULT_PATH
from nri_gpu.domain.errors import Exit
from tests.support import sandbox
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.unit_file import OURS, Line, Unit

FOLDER: Final = OURS.parent
SERVICE, PATH = FOLDER / "nri-gpu-cdi.service", FOLDER / "nri-gpu-cdi.path"
UNIT, WATCH, DAEMON = Unit.read(SERVICE), Unit.read(PATH), Unit.read()
VERIFY: dict[str, Any] = runpy.run_path(str(FOLDER / "verify.py"))
EXPLAINED_ABOVE: Final = {"Description", "WantedBy"}
# What keeps the daemon in has to keep this in too. Not the lines that are about living on, or about other folders.
SANDBOX: Final = {
    *("ProtectSystem", "UMask", "ProtectHome", "PrivateTmp", "PrivateMounts", "DevicePolicy", "DeviceAllow"),
    *("CapabilityBoundingSet", "AmbientCapabilities", "NoNewPrivileges", "RestrictSUIDSGID", "RestrictNamespaces"),
    *("RestrictRealtime", "LockPersonality", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
    *("MemoryDenyWriteExecute", "ProtectKernelModules", "ProtectKernelTunables", "ProtectKernelLogs"),
    *("ProtectControlGroups", "ProtectClock", "ProtectHostname", "ProtectProc", "PrivateIPC", "KeyringMode"),
    *("PrivateNetwork", "IPAddressDeny", "LimitCORE", "KillMode", "StateDirectoryMode"),
}
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


@pytest.mark.parametrize("line", UNIT.lines + WATCH.lines, ids=lambda line: f"{line.key}={line.value}"[:50])
def test_every_line_says_why(line: Line) -> None:
    assert line.why or line.key in EXPLAINED_ABOVE


def test_it_calls_a_verb_there_is_and_writes_where_runtimes_look() -> None:
    _, verb, action, option, output = UNIT.value("ExecStart").split()
    [found] = [each for each in VERBS if each.name == verb]
    assert any(action in each.settings.get("choices", ()) for each in found.options)
    assert any(option in each.flags for each in found.options)
    # Where systemd is, /var/run is a link to /run.
    assert Path("/var", *Path(output).parent.parts[1:]) in STANDARD
    assert Path(output).suffix in SUFFIXES


def test_its_folders_are_the_verbs() -> None:
    output = Path(UNIT.value("ExecStart").split()[-1])
    assert Path("/run", UNIT.value("RuntimeDirectory")) == output.parent
    assert (UNIT.value("RuntimeDirectoryMode"), UNIT.value("RuntimeDirectoryPreserve")) == ("0755", "yes")
    assert DEFAULT_STAGE in {Path("/var/lib", name) for name in UNIT.words("StateDirectory")}


def test_a_machine_without_gpus_has_no_failed_unit() -> None:
    assert UNIT.words("SuccessExitStatus") == [str(int(Exit.UNAVAILABLE))]


def test_one_starts_the_other() -> None:
    assert WATCH.value("Unit") == SERVICE.name
    assert str(DEFAULT_PATH) in WATCH.values("PathChanged")
    # It never ends, so a Condition or a `PathExists=` would start the service over and over.
    assert {line.key for line in WATCH.lines if line.section == "Path"} == {"PathChanged", "Unit"}


@pytest.mark.parametrize("key", sorted(SANDBOX))
def test_it_is_kept_in_like_the_daemon(key: str) -> None:
    assert UNIT.values(key) == DAEMON.values(key)


@needs_systemd
def test_systemd_has_nothing_against_the_service() -> None:
    assert VERIFY["faults"](SERVICE) == []


@needs_systemd
def test_systemd_has_nothing_against_both_together(tmp_path: Path) -> None:
    for unit in (SERVICE, PATH):
        (tmp_path / unit.name).write_text(VERIFY["runnable"](unit.read_text(), sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert "nri-gpu-cdi" not in done.stderr


@pytest.mark.containerd
@pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of namespaces needs root")
def test_the_verb_works_in_the_sandbox(tmp_path: Path) -> None:
    """As the daemon's unit has it, whose lines this one shares."""
    driver = make_driver_root(tmp_path / "driver")
    rw = tmp_path / "rw"
    rw.mkdir()
    places = ["--gpus", FOUR_GPUS, "--driver-root", driver, "--stage-dir", rw / "stage", "--output", rw / "cdi.json"]
    program = [sys.executable, "-m", "nri_gpu", "cdi", "generate", *map(str, places)]
    command = sandbox.command(program, rw=[rw], keep=[driver])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=sandbox.PROJECT)
    assert (done.returncode, done.stderr) == (0, "")
    assert (rw / "cdi.json").stat().st_mode & 0o777 == 0o644
    [tree] = [folder for folder in (rw / "stage").glob("*/compute+utility")]
    assert tree.stat().st_mode & 0o777 == 0o755
