"""The drop-in and the mount for MPS: every line says why, systemd has nothing against them, the unit stays tight."""

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.domain.mps import DEFAULT_MPS_DIR
from tests.support.unit_file import OURS, Line, Unit

FILE = OURS.parent / "nri-gpu.service.d" / "mps.conf"
UNIT = Unit.read(FILE)
MOUNT = OURS.parent / (DEFAULT_MPS_DIR.strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount")
VERIFY: dict[str, Any] = runpy.run_path(str(OURS.with_name("verify.py")))
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


@pytest.mark.parametrize("line", UNIT.lines, ids=lambda line: f"{line.key}={line.value}"[:40])
def test_every_line_says_why(line: Line) -> None:
    assert line.why


def test_daemons_outlive_us_and_may_mount_and_be_others() -> None:
    assert UNIT.value("KillMode") == "process"
    assert {"CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"} <= set(UNIT.words("CapabilityBoundingSet"))
    assert UNIT.value("RestrictNamespaces") == "mnt"


def test_what_tenants_write_is_bounded_in_bytes_and_in_files() -> None:
    unit = Unit.read(MOUNT)
    assert (unit.value("Where"), unit.value("Type")) == (DEFAULT_MPS_DIR, "tmpfs")
    options = dict(option.partition("=")[::2] for option in unit.value("Options").split(","))
    assert options.keys() == {"size", "nr_inodes", "mode", "nosuid", "nodev", "noexec"}
    assert (options["size"], options["mode"]) == ("10%%", "0700")
    assert UNIT.value("Wants") == UNIT.value("After") == MOUNT.name


@needs_systemd
@pytest.mark.parametrize("file", [FILE, MOUNT], ids=lambda file: file.suffix)
def test_systemd_has_nothing_against_it(file: Path) -> None:
    assert VERIFY["faults"](file) == []


@needs_systemd
def test_systemd_sees_what_is_wrong_with_it(tmp_path: Path) -> None:
    folder = tmp_path / FILE.parent.name
    folder.mkdir()
    (tmp_path / OURS.name).write_text(OURS.read_text())
    (folder / FILE.name).write_text(FILE.read_text().replace("TasksMax", "TaskMax"))
    assert any("Unknown key" in fault for fault in VERIFY["faults"](folder / FILE.name))
