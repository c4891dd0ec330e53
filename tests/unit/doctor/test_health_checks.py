"""GPUs that wait for a reset, and those on which the applications of several namespaces fail."""

from __future__ import annotations

import tomllib

import pytest

from nri_gpu.domain.finding import Level
from nri_gpu.domain.health import HealthNotes
from nri_gpu.policy.read import parse_policy
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
    """A pool for nobody."""
    notes = {make.uuid(0): HealthNotes(namespaces=("a", "b", "c"))}
    fix = node.found(status=node.status(notes=notes))["GPU 0"].fix
    policy = parse_policy(tomllib.loads("\n".join(fix[:-1])), "f")
    pool = policy.pool.members(make.inventory())[make.uuid(0)]
    assert pool.namespaces is None
    assert make.uuid(1) not in policy.pool.members(make.inventory())
