"""GPUs that wait for a reset, and those on which the applications of several namespaces fail."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.cli.main import parse
from nri_gpu.cordon.cordon_file import FILE, CordonRecord, write_cordons
from nri_gpu.daemon.answers import CordonStatus
from nri_gpu.domain.finding import Level
from nri_gpu.domain.health import HealthNotes
from nri_gpu.policy.model import Policy
from nri_gpu.policy.usage_settings import UsageSettings
from tests.support import builders as make
from tests.unit.doctor.node import DoctorNode

DUE = "a reset is due since XID 46, GPU stopped processing"
NOTES = {
    "a due reset": (
        HealthNotes(reset=DUE),
        Level.ERROR,
        f"it is withheld until it is reset: {DUE}",
        f"nri-gpu repaired {make.uuid(0)}",
    ),
    "a reset soon": (HealthNotes(soon="errors"), Level.WARNING, "once its holder has ended: errors", "--gpu-reset"),
    "failures": (
        HealthNotes(namespaces=("a", "b", "c")),
        Level.WARNING,
        "containers of 3 namespaces (a, b, c), so the GPU may be the cause",
        make.uuid(0),
    ),
}


@pytest.mark.parametrize(("notes", "level", "meaning", "fix"), NOTES.values(), ids=NOTES)
def test_what_needs_a_hand(node: DoctorNode, notes: HealthNotes, level: Level, meaning: str, fix: str) -> None:
    finding = node.found(status=node.status(notes={make.uuid(0): notes}))["GPU 0"]
    assert finding.level is level
    assert meaning in finding.meaning
    assert fix in "\n".join(finding.fix)


def test_what_withholds_a_gpu_by_hand_does(node: DoctorNode) -> None:
    notes = {make.uuid(0): HealthNotes(namespaces=("a", "b", "c"))}
    (fix,) = node.found(status=node.status(notes=notes))["GPU 0"].fix
    assert parse(*shlex.split(fix)[1:]).why == "applications fail on it"


def test_who_took_a_gpu_out_of_use_and_why(node: DoctorNode) -> None:
    cordons = {make.uuid(0): CordonStatus(at_s=1.0, by="alice", why="fan broken")}
    finding = node.found(status=node.status(cordons=cordons))["GPU 0"]
    assert finding.level is Level.WARNING
    assert finding.meaning == "it was taken out of use by alice: fan broken"
    assert finding.fix == (f"nri-gpu uncordon {make.uuid(0)}    # once that is over",)
    fault = node.found(status=node.status(cordon_fault="cordoned.json cannot be read"))["GPUs out of use"]
    assert fault.level is Level.ERROR


def test_without_a_daemon_the_file_says_who_took_a_gpu_out_of_use(node: DoctorNode, tmp_path: Path) -> None:
    changes = {"status": None, "policy": replace(Policy.default(), usage=UsageSettings(dir=str(tmp_path)))}
    write_cordons(tmp_path, {make.uuid(3): CordonRecord(at_s=1.0, by="alice", why="fan broken")})
    finding = node.found(**changes)[f"GPU {make.uuid(3)}"]
    assert (finding.level, finding.meaning) == (Level.WARNING, "it was taken out of use by alice: fan broken")
    (tmp_path / FILE).write_text("{")
    fault = node.found(**changes)["GPUs out of use"]
    assert fault.level is Level.ERROR
    assert str(tmp_path / FILE) in fault.meaning
