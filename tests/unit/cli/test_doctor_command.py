"""`nri-gpu doctor`: exit codes, and daemons that answer, do not, or are none."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.terminal import show_whole
from nri_gpu.daemon.answers import ObserverStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.node import Majors
from tests.support import builders as make
from tests.support.views import status_json, view
from tests.unit.cli.conftest import NriGpuCall, daemon
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


@pytest.mark.parametrize("named", [(), ("--policy", "FILE")])
def test_what_options_could_mend_is_no_fault_while_they_are_not_known(
    host: DoctorNode, nri_gpu: NriGpuCall, named: tuple[str, ...]
) -> None:
    """The chart switches one of the two off by `--no-kubelet`, and its daemon is away."""
    file = host.write("etc/nri-gpu/policy.toml", "[kubelet]\nenabled = true\n[dra]\nenabled = true\n")
    arguments = ("doctor", "--root", host.root, "-o", "json", *(file if each == "FILE" else each for each in named))
    without = nri_gpu(*arguments)
    with daemon(host.root / "run/nri-gpu", json.dumps(ANSWER).encode()):
        by_default = nri_gpu(*arguments)
    for done, wrong in ((without, False), (by_default, True)):
        found = [each for part in done.document["sections"] for each in part["findings"] if each["subject"] == "policy"]
        assert ["both offer the same GPUs" in each["meaning"] for each in found] == [wrong]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (("etc/nri-gpu/policy.toml", "run/nri-gpu/policy.last"), "/etc/nri-gpu/policy.toml"),
        (("run/nri-gpu/policy.last",), "/run/nri-gpu/policy.last"),
        ((), "the built-in defaults"),
    ],
)
def test_the_policy_in_force(host: DoctorNode, nri_gpu: NriGpuCall, files: tuple[str, ...], source: str) -> None:
    """The daemon's, if it is in a pod as its state folder has it."""
    host.remove("etc/nri-gpu/policy.toml")
    for name in files:
        host.write(name, ALLOWED).chmod(0o600)
    with daemon(host.root / "run/nri-gpu", json.dumps(ANSWER).encode()):
        done = nri_gpu("doctor", "--root", host.root, "-o", "json")
    found = [each for part in done.document["sections"] for each in part["findings"] if each["subject"] == "policy"]
    assert [each["meaning"].replace(str(host.root), "") for each in found] == [f"no faults in {source}"]


def test_a_policy_that_was_in_force_and_is_gone(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    """By the node's own memory where no daemon says it; a blank file, whoever runs."""
    host.write("var/lib/nri-gpu/policy.in-force", "/etc/nri-gpu/policy.toml\n")
    host.remove("etc/nri-gpu/policy.toml")
    said = nri_gpu("doctor", "--root", host.root).out
    assert "policy.toml: is missing, and a policy was in force" in " ".join(said.split())
    host.write("etc/nri-gpu/policy.toml", " \n")
    with daemon(host.root / "run/nri-gpu", json.dumps(ANSWER).encode()):
        said = nri_gpu("doctor", "--root", host.root).out
    assert "policy.toml: is empty, and a policy was in force" in " ".join(said.split())


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
    assert "nri-gpu runs but does not answer" in " ".join(done.out.split())


def observe_folder(host: DoctorNode) -> Path:
    folder = host.root / "run/nri-gpu-observe"
    folder.mkdir(mode=0o700)
    return folder


OBSERVED = status_json(view(node=make.node(driver_version=VERSION), observer=ObserverStatus(looked_s=1.0)))


@pytest.mark.parametrize("options", [(), ("--state-dir", "/run/nri-gpu-observe")])
def test_where_no_daemon_answers_an_observer_is_asked(
    host: DoctorNode, nri_gpu: NriGpuCall, options: tuple[str, ...]
) -> None:
    with daemon(observe_folder(host), json.dumps(OBSERVED).encode()):
        done = nri_gpu("doctor", "--root", host.root, *options)
    assert "an observer answers, and no daemon in /run/nri-gpu:" in " ".join(done.out.split())
    assert "containers start without GPUs" not in done.out


def test_what_answers_in_the_observers_folder_and_is_none_is_not_believed(
    host: DoctorNode, nri_gpu: NriGpuCall
) -> None:
    with daemon(observe_folder(host), json.dumps(ANSWER).encode()):
        done = nri_gpu("doctor", "--root", host.root)
    assert done.code == Exit.FINDING


def test_an_empty_root_is_no_bug(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("doctor", "--root", tmp_path, "--state-dir", "/none")
    assert done.code == Exit.FINDING


def test_a_bundle(host: DoctorNode, nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    path = tmp_path / "node.tar.gz"
    done = nri_gpu("doctor", "--root", host.root, "--bundle", path)
    assert (done.code, path.stat().st_mode & 0o777) == (Exit.FINDING, 0o600)
    assert f"{path} is for a bug report" in done.err
    with tarfile.open(path) as archive:
        packed = archive.extractfile("nri-gpu-doctor/doctor.txt")
        assert packed is not None
        assert packed.read().decode() == done.out


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("node.zip", Exit.USAGE, "must end in .tar.gz"),
        ("none/node.tar.gz", Exit.UNAVAILABLE, "cannot be written: no such file"),
        ("/proc/node.tar.gz", Exit.UNAVAILABLE, "cannot be written"),
    ],
)
def test_a_bundle_that_cannot_be_written(
    host: DoctorNode, nri_gpu: NriGpuCall, tmp_path: Path, name: str, code: Exit, words: str
) -> None:
    done = nri_gpu("doctor", "--root", host.root, "--bundle", tmp_path / name)
    assert (done.code, words in done.err) == (code, True)


def test_a_full_disk(host: DoctorNode, nri_gpu: NriGpuCall) -> None:
    done = nri_gpu("doctor", "--root", host.root, "--bundle", "/dev/full/x.tar.gz")
    assert done.code == Exit.UNAVAILABLE


def test_in_colour_a_line_to_copy_is_whole() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard")
    show_whole([Line("x" * 60, Tone.BAD), Line("a\x1b[2Jb")], console)
    assert isinstance(console.file, io.StringIO)
    red, safe, _ = console.file.getvalue().split("\n")
    assert "x" * 60 in red
    assert red.startswith("\x1b[1;31m")
    assert "\x1b[2J" not in safe


def test_a_terminal_without_a_locale(host: DoctorNode) -> None:
    command = [sys.executable, "-m", "nri_gpu", "doctor", "--root", str(host.root), "--state-dir", "/run/\u00e4"]
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.FINDING, "")
    assert "no nri-gpu runs with state folder /run/\\xe4" in " ".join(done.stdout.split())
