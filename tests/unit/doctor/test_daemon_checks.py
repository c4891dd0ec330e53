"""The daemon, its guard and its policy: one fault a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import PolicyStatus, SynchronizeStatus
from nri_gpu.doctor.daemon_checks import JOIN
from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.finding import Finding, Level
from nri_gpu.plugin.process_looks import Lost
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.child import Unkilled
from nri_gpu.usage.usage_controller import Usages
from tests.support import builders as make
from tests.unit.doctor.node import HEALTHY_GUARD, HEALTHY_POLICY, DoctorNode, away

WRONG = PolicyError((Fault("policy.toml", "plugin.index", "must be a string", 3),))
SECRET = PolicyError((Fault("policy.toml", "", "user 7 may not read it", denied=True),))
# What is seen otherwise than on a healthy node.
SEEN: dict[str, dict[str, Any]] = {
    "no daemon": {"status": None, "silence": FileNotFoundError()},
    "a daemon that has ended": {"status": None, "silence": ConnectionRefusedError()},
    "a daemon that hangs": {"status": None, "silence": TimeoutError()},
    "a daemon that is closed to us": {"status": None, "silence": PermissionError()},
    "another program": {"status": None, "silence": ValueError("not a JSON object")},
    "a fault of the policy": {"policy_error": WRONG},
    "a policy that may not be read": {"policy_error": SECRET},
    "a policy without a word": {"policy": Policy()},
    "MPS without a mount for its clients": {"policy": replace(HEALTHY_POLICY, mps=MpsSettings(enabled=True))},
    "in a pod, with the guard in another": {"in_pod": True, "guard_dir": Path("/none")},
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen_of_it(node: DoctorNode, name: str) -> None:
    node.hold("seen", SEEN, name, **SEEN[name])


def test_a_daemon_whose_state_folder_is_gone(node: DoctorNode) -> None:
    node.process(812, "nri-gpu", "/usr/bin/python3", "/usr/bin/nri-gpu", "run")
    (found,) = (each for each in node.examine(**SEEN["no daemon"]).findings if each.subject == "daemon")
    assert "nri-gpu runs (pid 812), and its control socket is not in" in found.meaning
    assert "systemctl restart nri-gpu" in found.fix


@pytest.mark.parametrize("real", [False, True])
def test_a_daemon_that_simulates_and_joins_no_runtime(node: DoctorNode, *, real: bool) -> None:
    """It is not taken for the node's own daemon, whatever its pid."""
    node.process(811, "nri-gpu", "/usr/bin/python3", "/usr/bin/nri-gpu", "run", "--stand-by", "--gpus=/a.toml")
    if real:
        node.process(812, "nri-gpu", "/usr/bin/python3", "/usr/bin/nri-gpu", "run")
    (found,) = (each for each in node.examine(**SEEN["no daemon"]).findings if each.subject == "daemon")
    alone = "(pid 811) simulates a node (--gpus) and joins no runtime" in found.meaning
    assert (found.level, alone) == (Level.ERROR, not real)


def test_a_simulation_without_a_runtime_needs_no_guard(node: DoctorNode) -> None:
    seen = node.examine(status=node.status(connection=away(joined=False)), guard_dir=Path("/none"))
    (found,) = (each for each in seen.findings if each.subject == "registration")
    assert (found.level, found.fix) == (Level.WARNING, (JOIN,))
    assert "guard" not in {each.subject for each in seen.findings}


def test_a_second_one_on_the_runtime_is_an_error(node: DoctorNode) -> None:
    told = "the runtime asks two plugins of this name, 10-nri-gpu and 20-nri-gpu"
    seen = node.examine(status=node.status(connection=away(second=told)))
    (found,) = (each for each in seen.findings if each.subject == "second nri-gpu")
    assert (found.level, told in found.meaning) == (Level.ERROR, True)


LISTED = SynchronizeStatus(at_s=0.0, duration_s=0.1, parts=1, size_bytes=4096, objects=12, whole=True)
BOTH = make.ledger(make.entry(0), make.entry(0, to=make.container(of="other")))
GONE = Lost(ContainerId("gone"), "ml/gone", "main", (make.uuid(0),), 0.0, "", (41, 42))
UNSEEN = make.ledger(make.entry(1)).with_processes({ContainerId("train.main"): FirstProcess(43, 1)})
FAULTS: dict[str, dict[str, Any]] = {
    "a lost container": {"lost": (GONE,)},
    "a cgroup that is not seen": {"ledger": UNSEEN},
    "not connected": {"connection": away(ready=False, fault="registration failed")},
    "a list that is too long": {"connection": away(list_fault="too large")},
    "a list that was cut off": {"connection": away(synchronize=replace(LISTED, whole=False))},
    "a list that takes long": {"connection": away(synchronize=replace(LISTED, duration_s=1.5))},
    "no inventory": {"inventory_fault": "NVML hangs"},
    "no policy": {"policy": PolicyStatus("a.toml", "line 3")},
    "two pods on one GPU": {"ledger": BOTH},
    "a GPU of another component's on one": {"ledger": make.ledger(make.entry(0), others=[make.foreign(0, 1)])},
    "a rejected policy": {"policy": PolicyStatus(BUILT_IN, "", "line 3")},
    "a policy that is not on this node": {"policy": PolicyStatus("/etc/nri-gpu/policy.toml", "")},
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_it_says_of_itself(node: DoctorNode, name: str) -> None:
    node.hold("daemon", FAULTS, name, status=node.status(**FAULTS[name]))


def test_a_process_that_cannot_be_killed(node: DoctorNode) -> None:
    status = node.status(unkilled=(Unkilled("nvidia-smi", make.uuid(1), 4711, 10.0),))
    (found,) = (
        each for each in node.examine(status=status, now_s=100.0).findings if each.subject == "hanging programs"
    )
    assert found.level is Level.ERROR
    assert (
        f"nvidia-smi of {make.uuid(1)} (pid 4711) hangs in the kernel, and cannot be killed (for 90 s)" in found.meaning
    )
    assert "dmesg | grep NVRM" in found.fix[0]


def test_what_holds_nvml_open(node: DoctorNode) -> None:
    def of(usages: Usages) -> list[Finding]:
        found = node.examine(status=node.status(usages=usages)).findings
        return [each for each in found if each.subject == "samples"]

    (found,) = of(Usages(enabled=True, each_second=True))
    assert found.level is Level.OK
    assert "holds NVML open" in found.meaning
    assert not of(Usages(enabled=True))


def test_a_list_that_comes_through(node: DoctorNode) -> None:
    runtime = away(synchronize=LISTED, answered_s=100.0)
    found = [each.meaning for each in node.examine(status=node.status(connection=runtime), now_s=107.0).findings]
    assert "12 pods and containers, 4 KiB in 1 message, in 0.10 s" in found
    assert "registered with containerd 2.1.9; its last request was answered 7 s ago" in found


def no_guard(node: DoctorNode) -> None:
    node.remove("run/nri-gpu-guard/guard.json")


def not_installed(node: DoctorNode) -> None:
    no_guard(node)
    node.remove("etc/systemd/system/nri-gpu-guard.service")


def in_a_pod(node: DoctorNode) -> None:
    no_guard(node)
    node.process(900, "nri-gpu", "/opt/venv/bin/python", "/opt/venv/bin/nri-gpu", "guard", "--run-dir", "/run/x")
    node.write("proc/900/status", "NSpid:\t900\t1\n")


def guard(**fields: Any) -> Callable[[DoctorNode], None]:  # noqa: ANN401 - of a GuardStatus
    return lambda node: node.guard(replace(HEALTHY_GUARD, **fields))


GUARDS: dict[str, Callable[[DoctorNode], None]] = {
    "none": no_guard,
    "not installed": not_installed,
    "in a pod, seen from the host": in_a_pod,
    "not connected": guard(connected=False, fault="no NRI socket"),
    "with ungranted containers": guard(ungranted=3),
    "by the policy from before": guard(policy_fault="policy.last: is not TOML"),
    "of an earlier process": guard(started="1"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_that_does_not_guard(node: DoctorNode, name: str) -> None:
    GUARDS[name](node)
    node.hold("guard", GUARDS, name)
