"""`nri-gpu doctor`: exit codes, and daemons that answer, do not, or are none."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.domain.node import Majors
from tests.support import builders as make
from tests.unit.cli.conftest import NriGpuCall
from tests.unit.cli.test_status import daemon
from tests.unit.daemon.test_report import status_json, view
from tests.unit.doctor.node import VERSION, DoctorNode
from tests.unit.doctor.node import node as node

ANSWER = status_json(view(node=make.node(driver_version=VERSION, majors=Majors(1510, 1511, 1512))))
ALLOWED = '[namespaces]\nallow = ["ml"]\n'


@pytest.fixture
def host(node: DoctorNode) -> DoctorNode:
    node.write("etc/nri-gpu/policy.toml", ALLOWED)
    return node


def test_a_healthy_node(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    with daemon(host.root / "run/nri-gpu", json.dumps(ANSWER).encode()):
        done = nri_gpu("doctor", "--root", host.root)
    assert (done.code, done.err) == (Exit.OK, "")
    assert done.out.splitlines()[-1].startswith("0 errors, ")


def test_a_warning_alone_is_no_failure(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    host.remove("run/nri-gpu-guard/guard.json")
    with daemon(host.root / "run/nri-gpu", json.dumps(ANSWER).encode()):
        done = nri_gpu("doctor", "--root", host.root, "-o", "json")
    assert (done.code, done.document["counts"]["error"]) == (Exit.OK, 0)
    assert done.document["counts"]["warning"] >= 1


def test_an_error_is_a_finding(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    done = nri_gpu("doctor", "--root", host.root)
    assert done.code == Exit.FINDING
    assert "ERROR     daemon: no nri-gpu runs with state folder /run/nri-gpu" in done.out


def test_a_policy_with_faults(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    host.write("etc/nri-gpu/policy.toml", "[plugin]\nindex = 5\n")
    done = nri_gpu("doctor", "--root", host.root, "-o", "json")
    found = [each for part in done.document["sections"] for each in part["findings"] if each["subject"] == "policy"]
    assert (done.code, [each["level"] for each in found]) == (Exit.FINDING, ["error"])


@pytest.mark.parametrize("answer", [b"", b"[1]", b'{"schema": "nri-gpu/status/v9"}', b'{"error": "no such question"}'])
def test_an_answer_that_is_none(host: DoctorNode, nri_gpu: NriGpuCall, answer: bytes) -> None:
    with daemon(host.root / "run/nri-gpu", answer):
        done = nri_gpu("doctor", "--root", host.root)
    assert (done.code, "is no nri-gpu of this version" in " ".join(done.out.split())) == (Exit.FINDING, True)


def test_a_daemon_that_never_answers_costs_a_second(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(host.root / "run/nri-gpu/control.sock"))
        listener.listen()
        began = time.monotonic()
        done = nri_gpu("doctor", "--root", host.root)
    assert time.monotonic() - began < 2
    assert "nri-gpu runs and does not answer" in " ".join(done.out.split())


def test_an_empty_root_is_no_bug(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("doctor", "--root", tmp_path, "--state-dir", "/none")
    assert done.code == Exit.FINDING
