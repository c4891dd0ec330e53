"""The daemon, its guard and its policy: one fault a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import PolicyStatus, SynchronizeStatus
from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.finding import Level
from nri_gpu.plugin.lost import Lost
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.mps_settings import MpsSettings
from tests.support import builders as make
from tests.unit.doctor.node import HEALTHY_GUARD, HEALTHY_POLICY, DoctorNode, away

SILENCE: dict[str, tuple[OSError | ValueError, Level, str, str]] = {
    "none": (FileNotFoundError(), Level.ERROR, "no nri-gpu runs", "systemctl enable --now nri-gpu"),
    "ended": (ConnectionRefusedError(), Level.ERROR, "has ended", "systemctl enable --now nri-gpu"),
    "hangs": (TimeoutError(), Level.ERROR, "does not answer", "systemctl restart nri-gpu"),
    "closed to us": (PermissionError(), Level.UNSEEN, "only root may query", "sudo nri-gpu doctor"),
    "another program": (ValueError("not a JSON object"), Level.ERROR, "not a JSON object", "nri-gpu --version"),
}


@pytest.mark.parametrize(("silence", "level", "words", "fix"), SILENCE.values(), ids=SILENCE)
def test_a_daemon_that_does_not_answer(
    node: DoctorNode, silence: OSError | ValueError, level: Level, words: str, fix: str
) -> None:
    finding = node.only(status=None, silence=silence)
    assert (finding.level, finding.subject, words in finding.meaning) == (level, "daemon", True)
    assert any(fix in line for line in finding.fix)


LISTED = SynchronizeStatus(at_s=0.0, duration_s=0.1, parts=1, size_bytes=4096, objects=12, whole=True)
BOTH = make.ledger(make.entry(0), make.entry(0, to=make.container(of="other")))
GONE = Lost(ContainerId("gone"), "ml/gone", "main", (make.uuid(0),), 0.0, "", (41, 42))
UNSEEN = make.ledger(make.entry(1)).with_process(ContainerId("train.main"), FirstProcess(43, 1))
WARNINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a lost container": ({"lost": (GONE,)}, "lost containers", "ml/gone, container main, has ended for the runtime"),
    "a cgroup that is not seen": ({"ledger": UNSEEN}, "cgroups", "the cgroups of ml/train are not seen"),
}
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "not connected": (
        {"connection": away(ready=False, fault="registration failed")},
        "registration",
        "registration failed",
    ),
    "a list that is too long": ({"connection": away(list_fault="too large")}, "registration", "too large"),
    "a list that was cut off": (
        {"connection": away(synchronize=replace(LISTED, whole=False))},
        "Synchronize",
        "cut off after 12 pods and containers, 4 KiB in 1 message",
    ),
    "no inventory": ({"inventory_fault": "NVML hangs"}, "inventory", "NVML hangs"),
    "no policy": ({"policy": PolicyStatus("a.toml", "line 3")}, "policy in force", "line 3"),
    "two pods on one GPU": ({"ledger": BOTH}, "overlapping grants", "was granted to ml/other and ml/train, to one"),
    "a rejected policy": ({"policy": PolicyStatus(BUILT_IN, "", "line 3")}, "policy file", "line 3"),
}


@pytest.mark.parametrize(("fields", "subject", "words"), FAULTS.values(), ids=FAULTS)
def test_what_keeps_it_from_granting(node: DoctorNode, fields: dict[str, Any], subject: str, words: str) -> None:
    finding = node.only(status=node.status(**fields))
    assert (finding.level, finding.subject, words in finding.meaning) == (Level.ERROR, subject, True)
    assert finding.fix


@pytest.mark.parametrize(("fields", "subject", "words"), WARNINGS.values(), ids=WARNINGS)
def test_who_holds_gpus_though_it_is_over(node: DoctorNode, fields: dict[str, Any], subject: str, words: str) -> None:
    finding = node.only(status=node.status(**fields))
    assert (finding.level, finding.subject, words in finding.meaning) == (Level.WARNING, subject, True)


def test_a_list_that_comes_through(node: DoctorNode) -> None:
    runtime = away(synchronize=LISTED, answered_s=100.0)
    found = [each.meaning for each in node.examine(status=node.status(connection=runtime), now_s=107.0).findings]
    assert "12 pods and containers, 4 KiB in 1 message, in 0.10 s" in found
    assert "registered with containerd 2.1.9; its last request was answered 7 s ago" in found
    slow = node.only(status=node.status(connection=away(synchronize=replace(LISTED, duration_s=1.5))))
    assert (slow.level, slow.subject) == (Level.WARNING, "Synchronize")


def test_faults_of_the_policy(node: DoctorNode) -> None:
    finding = node.only(policy_error=PolicyError((Fault("policy.toml", "plugin.index", "must be a string", 3),)))
    assert "policy.toml:3: plugin.index: must be a string" in finding.meaning
    assert finding.fix == ("nri-gpu check",)
    secret = PolicyError((Fault("policy.toml", "", "user 7 may not read it", denied=True),))
    assert node.only(policy_error=secret).level is Level.UNSEEN


def test_advice_on_the_policy_says_what_to_write(node: DoctorNode) -> None:
    finding = node.only(policy=Policy())
    assert (finding.level, finding.subject) == (Level.WARNING, "policy advice")
    assert "namespaces.allow" in finding.meaning
    assert finding.fix[-1] == "nri-gpu check && systemctl reload nri-gpu"


def test_mps_without_a_mount_for_its_clients(node: DoctorNode) -> None:
    finding = node.only(policy=replace(HEALTHY_POLICY, mps=MpsSettings(enabled=True)))
    assert "every container that asks with mode=mps is refused" in finding.meaning


def test_no_guard(node: DoctorNode) -> None:
    node.remove("run/nri-gpu-guard/guard.json")
    finding = node.only()
    assert (finding.level, finding.fix[0]) == (Level.WARNING, "systemctl enable --now nri-gpu-guard")
    node.remove("etc/systemd/system/nri-gpu-guard.service")
    assert "docs/install.md" in node.only().fix[0]
    assert node.only().fix[1].startswith("kubectl get pods")


def test_a_guard_in_a_pod_is_seen_from_the_host(node: DoctorNode) -> None:
    node.remove("run/nri-gpu-guard/guard.json")
    node.process(900, "nri-gpu", "/opt/venv/bin/python", "/opt/venv/bin/nri-gpu", "guard", "--run-dir", "/run/x")
    node.write("proc/900/status", "NSpid:\t900\t1\n")
    finding = node.only()
    assert (finding.level, "pid 900" in finding.meaning) == (Level.UNSEEN, True)


def test_in_a_pod_the_guard_is_in_another(node: DoctorNode) -> None:
    assert node.only(in_pod=True, guard_dir=Path("/none")).level is Level.UNSEEN


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"connected": False, "fault": "no NRI socket"}, "no NRI socket"), ({"ungranted": 3}, "3 containers ran without")],
)
def test_a_guard_with_a_fault(node: DoctorNode, fields: dict[str, Any], words: str) -> None:
    node.guard(replace(HEALTHY_GUARD, **fields))
    finding = node.only()
    assert (finding.level, finding.subject, words in finding.meaning) == (Level.ERROR, "guard", True)
    assert "nri-gpu-guard" in finding.fix[0]


def test_the_guard_of_an_earlier_process(node: DoctorNode) -> None:
    node.guard(replace(HEALTHY_GUARD, pid=os.getpid(), started="1"))
    assert "no guard runs" in node.only().meaning


def test_a_policy_that_is_not_on_this_node(node: DoctorNode) -> None:
    finding = node.only(status=node.status(policy=PolicyStatus("/etc/nri-gpu/policy.toml", "")))
    assert (finding.level, finding.subject) == (Level.UNSEEN, "policy in force")
