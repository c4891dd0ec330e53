"""The unit file agrees with the daemon and explains itself; its checker sees what is wrong with a unit."""

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.cli.main import VERBS
from nri_gpu.daemon.app import DRAIN_S
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.supervisor import WAIT_MAX_S
from nri_gpu.plugin.transport import LIMITS
from nri_gpu.policy.model import Policy
from nri_gpu.system.succession import TAKES_OVER_S
from tests.support.unit_file import OURS, Line, Unit

UNIT = Unit.read()
# `verify.py` is a script, in a folder that is no package.
VERIFY: dict[str, Any] = runpy.run_path(str(OURS.with_name("verify.py")))
# Lines whose reason is the line before them, or plain to see.
EXPLAINED_ABOVE = {"RestartSec", "StateDirectoryMode", "WantedBy", "Description"}
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")

BREAKS_THE_JOB = {
    "NVML needs the driver's nodes": ("PrivateDevices", "yes"),
    "majors are in /proc/devices": ("ProcSubset", "pid"),
    "the NRI socket is root's": ("DynamicUser", "yes"),
    "hosts with user namespaces switched off could not start it": ("PrivateUsers", "yes"),
    "group root would see every process": ("ProtectProc", "invisible"),
}


@pytest.mark.parametrize("line", UNIT.lines, ids=lambda line: f"{line.key}={line.value}"[:40])
def test_every_line_says_why(line: Line) -> None:
    assert line.why or line.key in EXPLAINED_ABOVE


@pytest.mark.parametrize(("key", "value"), BREAKS_THE_JOB.values(), ids=BREAKS_THE_JOB)
def test_what_would_break_the_job_stays_out(key: str, value: str) -> None:
    assert UNIT.value(key) != value
    assert not UNIT.value("User")


def test_it_starts_a_verb_there_is() -> None:
    program, verb, _ = UNIT.value("ExecStart").split()
    assert Path(program).name == "nri-gpu"
    assert verb in {each.name for each in VERBS}


def test_its_folders_are_the_daemons() -> None:
    assert Path("/run") / UNIT.value("RuntimeDirectory") == DEFAULT_STATE
    assert UNIT.value("RuntimeDirectoryMode") == "0700"
    staged = Path(Policy.default().driver.stage_dir)
    assert staged in {Path("/var/lib") / name for name in UNIT.words("StateDirectory")}
    assert UNIT.value("StateDirectoryMode") == "0755"


@pytest.mark.parametrize("key", ["ExecStart", "RuntimeDirectory", "StateDirectory"])
def test_the_install_page_names_its_folders(key: str) -> None:
    """All of them: whoever follows the page leaves no trace."""
    page = (OURS.parents[1] / "docs" / "install.md").read_text()
    prefix = {"ExecStart": "", "RuntimeDirectory": "/run/", "StateDirectory": "/var/lib/"}[key]
    assert prefix + UNIT.words(key)[0] in page


def test_the_marks_key_outlives_a_stop() -> None:
    assert UNIT.value("RuntimeDirectoryPreserve") == "yes"


def test_no_hidden_folder_holds_what_it_needs() -> None:
    hidden = [Path(word.removeprefix("-")) for word in UNIT.words("InaccessiblePaths")]
    driver, plugin = Policy.default().driver, Policy.default().plugin
    for needed in (
        DEFAULT_STATE,
        Path(driver.stage_dir),
        Path(plugin.socket),
        Path(UNIT.value("ExecStart").split()[0]),
    ):
        assert not set(hidden) & {needed, *needed.parents}


def test_nobody_kills_it_while_it_waits_for_a_runtime() -> None:
    assert (UNIT.value("Type"), UNIT.value("TimeoutStartSec")) == ("notify", "infinity")
    assert (UNIT.value("Restart"), UNIT.value("StartLimitIntervalSec")) == ("always", "0")


def test_a_kubelet_waits_for_it_but_not_for_ever() -> None:
    assert "kubelet.service" in UNIT.words("Before")
    assert "containerd.service" in UNIT.words("After")
    assert LIMITS.register_s < int(UNIT.value("JobRunningTimeoutSec")) < 120
    # A requirement would take us down with the runtime, each time it is restarted.
    assert not [key for key in ("Requires", "BindsTo", "PartOf", "Requisite") if UNIT.values(key)]


def test_its_times_fit_the_daemons() -> None:
    assert int(UNIT.value("TimeoutStopSec")) > DRAIN_S + TAKES_OVER_S
    assert float(UNIT.value("RestartSec").removesuffix("ms")) / 1000 <= WAIT_MAX_S
    assert UNIT.words("RestartPreventExitStatus") == [str(int(Exit.USAGE))]


def test_every_kind_of_nvidia_node_of_ours_is_allowed() -> None:
    assert UNIT.value("DevicePolicy") == "closed"
    assert {value.split()[0] for value in UNIT.values("DeviceAllow")} == {"char-195", "char-nvidia-caps"}


def test_programs_are_replaced_whatever_stands_before_them() -> None:
    text = "ExecStart=/opt/x run\nExecStartPre=-+/opt/y\nExecReload=/bin/kill -HUP $MAINPID\nDescription=/opt/x\n"
    assert VERIFY["runnable"](text, "/p") == (
        "ExecStart=/p run\nExecStartPre=-+/p\nExecReload=/p -HUP $MAINPID\nDescription=/opt/x\n"
    )


def test_the_figure_is_read_from_the_report() -> None:
    assert VERIFY["figure"]("→ Overall exposure level for nri-gpu.service: 0.9 SAFE") == "0.9"
    assert VERIFY["figure"]("no such thing") == ""


@needs_systemd
def test_systemd_has_nothing_against_the_unit() -> None:
    assert VERIFY["faults"](OURS) == []


@needs_systemd
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        pytest.param("ProtectSystem=", "ProtectSystm=", "Unknown key 'ProtectSystm'", id="unknown key"),
        pytest.param("PrivateNetwork=yes", "PrivateNetwork=maybe", "boolean", id="wrong value"),
        pytest.param("CapabilityBoundingSet=", "#", "exposure", id="a line lost"),
    ],
)
def test_systemd_sees_what_is_wrong(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    unit = tmp_path / OURS.name
    unit.write_text(OURS.read_text().replace(f"\n{old}", f"\n{new}"))
    assert any(complaint in fault for fault in VERIFY["faults"](unit))


@pytest.mark.parametrize(("environment", "code"), [({}, 0), ({"CI": "true"}, 1)], ids=["at home", "in CI"])
def test_a_missing_systemd_is_said_and_fails_only_in_ci(
    environment: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CI", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert VERIFY["main"]([]) == code
    assert "systemd-analyze is not installed" in capsys.readouterr().out
