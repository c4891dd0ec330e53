"""What to install is named by its own name, which is its owners' on the package index; `nri-gpu` there is not ours."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.system import packages

ROOT = Path(__file__).parents[3]


def test_nothing_says_to_install_our_own_name() -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    said = re.compile(r"pip3? install[^\n]*?(?<![\w./-])['\"]?nri-gpu(?![\w/-])")
    texts = {name: (ROOT / name).read_text(errors="replace") for name in listed if (ROOT / name).is_file()}
    assert [name for name, text in texts.items() if said.search(text)] == []


def test_the_command_is_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        packages.not_installed("grpc")
        == f"grpcio is not installed: {shlex.quote(sys.executable)} -m pip install grpcio"
    )
    monkeypatch.setattr(sys, "executable", "/opt/my gpu/python")
    assert packages.how_to_install("prometheus_client") == "'/opt/my gpu/python' -m pip install prometheus-client"
    monkeypatch.setattr(sys, "executable", "")
    assert packages.how_to_install("urllib3") == "python3 -m pip install urllib3"


def test_of_a_part_of_a_package_the_package_is_named() -> None:
    assert packages.import_failed(ImportError("no", name="grpc.aio")).endswith("-m pip install grpcio")
    assert packages.import_failed(ImportError("no module x", name="x")) == "no module x"
