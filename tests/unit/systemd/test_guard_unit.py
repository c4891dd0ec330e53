"""The guard's unit: it agrees with the guard, explains itself, stays tight; and the guard stays small."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.cli.main import VERBS
from nri_gpu.daemon import guard
from nri_gpu.domain.errors import Exit
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.plugin.supervisor import WAIT_MAX_S
from nri_gpu.policy.model import Policy
from tests.support.unit_file import OURS, Line, Unit

FILE: Final = OURS.with_name("nri-gpu-guard.service")
UNIT, DAEMON = Unit.read(FILE), Unit.read()
VERIFY: dict[str, Any] = runpy.run_path(str(OURS.with_name("verify.py")))
EXPLAINED_ABOVE: Final = {"RestartSec", "WantedBy", "Description"}
# What the daemon has and the guard has not, because it has no driver, no children that outlive it, no state of its own.
DAEMONS_ALONE: Final = {"DeviceAllow", "StateDirectory", "StateDirectoryMode", "RuntimeDirectoryPreserve", "KillMode"}
HEAVY: Final = ("decide", "injection", "inventory", "driver", "host", "allocation.place")
CONFIG: Final = OURS.parents[1] / "config"


@pytest.mark.parametrize("line", UNIT.lines, ids=lambda line: f"{line.key}={line.value}"[:40])
def test_every_line_says_why(line: Line) -> None:
    assert line.why or line.key in EXPLAINED_ABOVE


def test_it_starts_the_verb_and_its_folder_is_the_verbs() -> None:
    program, verb = UNIT.value("ExecStart").split()
    assert program == DAEMON.value("ExecStart").split()[0]
    assert verb in {each.name for each in VERBS}
    assert Path("/run") / UNIT.value("RuntimeDirectory") == DEFAULT_RUN_DIR


def test_it_is_no_looser_than_the_daemons() -> None:
    ours = {line.key for line in UNIT.lines}
    assert {line.key for line in DAEMON.lines if line.section == "Service"} - ours == {*DAEMONS_ALONE, "ExecReload"}
    for key in ("SystemCallFilter", "CapabilityBoundingSet", "ProtectSystem", "UMask"):
        assert UNIT.values(key) == DAEMON.values(key)
    assert set(UNIT.words("RestrictAddressFamilies")) < set(DAEMON.words("RestrictAddressFamilies"))
    assert UNIT.on("PrivateDevices")


def test_nothing_takes_it_along() -> None:
    """It counts while the daemon is away, and while the runtime is."""
    assert not [key for key in ("Requires", "BindsTo", "PartOf", "Requisite", "Wants") if UNIT.values(key)]
    assert (UNIT.value("Type"), UNIT.value("TimeoutStartSec")) == ("notify", "infinity")
    assert (UNIT.value("Restart"), UNIT.value("StartLimitIntervalSec")) == ("always", "0")
    assert float(UNIT.value("RestartSec").removesuffix("ms")) / 1000 <= WAIT_MAX_S
    assert UNIT.words("RestartPreventExitStatus") == [str(int(Exit.USAGE))]
    assert int(UNIT.value("TimeoutStopSec")) > guard.DRAIN_S


def test_the_installation_brings_it() -> None:
    """Without it a container created and started while the daemon is away runs without its GPU."""
    assert DAEMON.words("Also") == [FILE.name]
    page = (OURS.parents[1] / "docs" / "install.md").read_text()
    assert page.count(f"install -m 0644 systemd/{OURS.name} systemd/{FILE.name} /etc/systemd/system/") == 2
    assert "systemctl enable --now nri-gpu nri-gpu-guard" in page


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_has_nothing_against_it() -> None:
    assert VERIFY["faults"](FILE) == []


def test_it_loads_nothing_that_decides() -> None:
    """A bug there must not be a bug here, and neither must what it weighs."""
    program = "import json, sys, nri_gpu.daemon.guard; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = json.loads(done.stdout)
    heavy = tuple(f"nri_gpu.{name}" for name in HEAVY)
    assert not [name for name in loaded if name.startswith((*heavy, "pynvml", "grpc", "ctypes", "yaml"))]


def test_the_sample_of_required_plugins_names_both() -> None:
    sample = tomllib.loads((CONFIG / "containerd" / "required-plugins.toml").read_text())
    validator = sample["plugins"]["io.containerd.nri.v1.nri"]["default_validator"]
    policy = Policy.default()
    assert validator["enable"] is True
    assert set(validator["required_plugins"]) == {policy.plugin.name, policy.guard.name}
