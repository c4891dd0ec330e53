"""Containers are stopped through CRI, each by itself; what goes wrong with one is said of that one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from nri_gpu.system import cri_child as cri
from tests.support.cri_server import CriServer


def test_each_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusals = {
        "gone": (grpc.StatusCode.NOT_FOUND, "no such container"),
        "stuck": (grpc.StatusCode.UNKNOWN, "it will\nnot die"),
    }
    with CriServer(folder / "cri.sock", refusals) as server:
        assert cri.main([str(folder / "cri.sock"), "7", "10"], ["a\n", "gone\n", "stuck\n", "\n", "b"]) == 1
        assert server.stopped == {"a": 7, "b": 7}
    assert capsys.readouterr().out.splitlines() == ["a ok", "gone ok", "stuck UNKNOWN: it will not die", "b ok"]


def test_a_socket_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cri.main([str(folder / "none.sock"), "0", "1"], ["a"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(("a UNAVAILABLE: ", "a DEADLINE_EXCEEDED: "))


def test_without_grpcio_it_says_what_to_install(folder: Path) -> None:
    program = f"import sys; sys.modules['grpc'] = None; sys.argv = ['cri', '{folder}/cri.sock', '0', '1']\n"
    program += "import runpy; runpy.run_module('nri_gpu.system.cri_child', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], input="a", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'nri-gpu[cri]'" in done.stderr
    assert "Traceback" not in done.stderr
