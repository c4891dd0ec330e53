"""Whoever has containers stopped is told which ones are."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from nri_gpu.policy.model import Policy
from nri_gpu.system import cri as stopping
from nri_gpu.system.cri import stop_containers
from tests.support.cri_server import CriServer
from tests.support.log import Log


async def test_what_the_runtime_did_not_stop_is_not_stopped(folder: Path, log: Log) -> None:
    refusals = {
        "gone": (grpc.StatusCode.NOT_FOUND, "no such container"),
        "stuck": (grpc.StatusCode.UNKNOWN, "it will not die"),
    }
    guard = replace(Policy.default().guard, cri_socket=str(folder / "cri.sock"), stop_grace_s=0)
    names = {container: f"ml/{container}" for container in ("a", "gone", "stuck")}
    with CriServer(folder / "cri.sock", refusals):
        assert await stop_containers(names, guard, "tested") == {"a", "gone"}
    assert log.one("container not stopped").fields["pod_name"] == "ml/stuck"


async def test_a_program_that_dies_stopped_nothing(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "CRI_MODULE", "nri_gpu.system.there_is_no_such_module")
    guard = replace(Policy.default().guard, cri_socket=str(folder / "cri.sock"))
    assert await stop_containers({"a": "ml/a"}, guard, "tested") == frozenset()
    assert "there_is_no_such_module" in log.one("containers not stopped").fields["fault"]
