"""Files of ours that others can read or write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.finding import Level
from nri_gpu.policy.plugin_settings import AuditSettings, ControlSettings
from tests.unit.doctor.node import HEALTHY_POLICY, DoctorNode

Break = Callable[[DoctorNode], object]
STATE = "run/nri-gpu"


def made(path: str, mode: int) -> Break:
    return lambda node: node.write(path, "").chmod(mode)


def moded(path: str, mode: int) -> Break:
    return lambda node: (node.root / path).chmod(mode)


BROKEN: dict[str, Break] = {
    "a key that others can read": moded(f"{STATE}/key", 0o644),
    "a ledger that others can write": moded(f"{STATE}/ledger.json", 0o622),
    "a state folder that others can enter": moded(STATE, 0o755),
    "a socket for everybody": made(f"{STATE}/control.sock", 0o666),
    "somebody else's file": lambda node: os.chown(node.root / STATE / "key", 7, 7),
    "a unit": made("etc/systemd/system/nri-gpu.service", 0o666),
    "a guard's folder": moded("run/nri-gpu-guard", 0o777),
    "staged files": lambda node: node.write("var/lib/nri-gpu/drivers/580-1/lib", "").parent.chmod(0o777),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_with_its_fix(node: DoctorNode, name: str) -> None:
    BROKEN[name](node)
    node.hold("files", BROKEN, name)


def test_a_policy_that_others_can_write(node: DoctorNode, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.touch()
    path.chmod(0o666)
    assert str(path) in node.only(policy=replace(HEALTHY_POLICY, source=str(path))).meaning


def test_a_group_that_may_ask(node: DoctorNode) -> None:
    moded(STATE, 0o710)(node)
    made(f"{STATE}/control.sock", 0o660)(node)
    assert len([each for each in node.examine().findings if each.subject == "our files"]) == 2
    assert node.found(policy=replace(HEALTHY_POLICY, control=ControlSettings(group="gpu"))) == {}


def test_an_audit_log_elsewhere(node: DoctorNode) -> None:
    node.write("var/log/nri-gpu/audit.jsonl", "").chmod(0o644)
    finding = node.only(policy=replace(HEALTHY_POLICY, audit=AuditSettings(dir="/var/log/nri-gpu")))
    assert "/var/log/nri-gpu/audit.jsonl: mode 0644: other users can read it" in finding.meaning


def test_a_socket_for_metrics_is_the_policys(node: DoctorNode) -> None:
    node.listen(f"{STATE}/metrics.sock")
    (node.root / STATE / "metrics.sock").chmod(0o666)
    assert node.found() == {}


def test_what_clients_of_mps_write_is_theirs(node: DoctorNode) -> None:
    (node.root / STATE / "mps").mkdir(mode=0o755)
    assert node.found() == {}


def test_a_user_who_may_not_look(node: DoctorNode) -> None:
    findings = node.found_by_nobody()
    assert findings["our files"].level is Level.UNSEEN
    assert "/run/nri-gpu" in findings["our files"].meaning


def test_a_masked_unit_leads_to_what_all_may_write(node: DoctorNode) -> None:
    unit = node.write("etc/systemd/system/nri-gpu.service", "")
    unit.unlink()
    unit.symlink_to("/dev/null")
    assert "our files" not in node.found()
