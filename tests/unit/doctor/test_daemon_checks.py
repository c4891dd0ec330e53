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

SILENCE: dict[str, OSError | ValueError] = {
    "none": FileNotFoundError(),
    "ended": ConnectionRefusedError(),
    "hangs": TimeoutError(),
    "closed to us": PermissionError(),
    "another program": ValueError("not a JSON object"),
}


@pytest.mark.parametrize("name", SILENCE)
def test_a_daemon_that_does_not_answer(node: DoctorNode, name: str) -> None:
    node.hold("silence", SILENCE, name, status=None, silence=SILENCE[name])


LISTED = SynchronizeStatus(at_s=0.0, duration_s=0.1, parts=1, size_bytes=4096, objects=12, whole=True)
BOTH = make.ledger(make.entry(0), make.entry(0, to=make.container(of="other")))
GONE = Lost(ContainerId("gone"), "ml/gone", "main", (make.uuid(0),), 0.0, "", (41, 42))
UNSEEN = make.ledger(make.entry(1)).with_process(ContainerId("train.main"), FirstProcess(43, 1))
FAULTS: dict[str, dict[str, Any]] = {
    "a lost container": {"lost": (GONE,)},
    "a cgroup that is not seen": {"ledger": UNSEEN},
    "not connected": {"connection": away(ready=False, fault="registration failed")},
    "a list that is too long": {"connection": away(list_fault="too large")},
    "a list that was cut off": {"connection": away(synchronize=replace(LISTED, whole=False))},
    "no inventory": {"inventory_fault": "NVML hangs"},
    "no policy": {"policy": PolicyStatus("a.toml", "line 3")},
    "two pods on one GPU": {"ledger": BOTH},
    "a rejected policy": {"policy": PolicyStatus(BUILT_IN, "", "line 3")},
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_it_says_of_itself(node: DoctorNode, name: str) -> None:
    node.hold("daemon", FAULTS, name, status=node.status(**FAULTS[name]))


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
