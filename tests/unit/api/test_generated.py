"""The checked-in modules are what the pinned generator makes of api/*.proto."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_no_drift() -> None:
    pytest.importorskip("grpc_tools", reason="the generator is in the codegen extra")
    command = [sys.executable, str(ROOT / "api" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["nri_pb2.py", "ttrpc_pb2.py"])
def test_the_protobuf_floor_is_no_older_than_the_generator(name: str) -> None:
    text = (ROOT / "nri_gpu" / "_pb" / name).read_text()
    made_with = re.search(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", text)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floor = re.search(r"protobuf>=(\d+)\.(\d+)\.(\d+)", " ".join(dependencies))
    assert made_with
    assert floor
    assert tuple(map(int, floor.groups())) >= tuple(map(int, made_with.groups()))
