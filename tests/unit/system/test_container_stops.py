"""Containers are stopped through CRI by a child process; what goes wrong with one is said of that one."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from nri_gpu.policy.model import Policy
from nri_gpu.system import container_stops
from nri_gpu.system.container_stops import stop_containers
from tests.support.cri_server import CriServer
from tests.support.log import Log

REFUSALS = {
    "gone": (grpc.StatusCode.NOT_FOUND, "no such container"),
    "stuck": (grpc.StatusCode.UNKNOWN, "it will\nnot die"),
}


def test_each_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CriServer(folder / "cri.sock", REFUSALS) as server:
        assert container_stops.main([str(folder / "cri.sock"), "7", "10"], ["a\n", "gone\n", "stuck\n", "\n", "b"]) == 1
        assert server.stopped == {"a": 7, "b": 7}
    assert capsys.readouterr().out.splitlines() == ["a ok", "gone ok", "stuck UNKNOWN: it will not die", "b ok"]


def test_a_socket_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert container_stops.main([str(folder / "none.sock"), "0", "0.2"], ["a"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(("a UNAVAILABLE: ", "a DEADLINE_EXCEEDED: "))


async def test_what_the_runtime_did_not_stop_is_not_stopped(folder: Path, log: Log) -> None:
    guard = replace(Policy.default().guard, cri_socket=str(folder / "cri.sock"), stop_grace_s=0)
    names = {container: f"ml/{container}" for container in ("a", "gone", "stuck")}
    with CriServer(folder / "cri.sock", REFUSALS):
        assert await stop_containers(names, guard, "tested") == {"a", "gone"}
    assert log.one("container not stopped").fields["pod_name"] == "ml/stuck"


async def test_a_child_that_dies_stopped_nothing(folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "python"
    program.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    guard = replace(Policy.default().guard, cri_socket=str(folder / "cri.sock"))
    assert await stop_containers({"a": "ml/a"}, guard, "tested") == frozenset()
    assert log.one("containers not stopped").fields["fault"] == "no such module"


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("", "Permission denied"),
        ("#!/bin/sh\nexec sleep 60\n", "no answer on "),
    ],
    ids=["no program", "one that does not end"],
)
async def test_a_child_that_cannot_stop_any(
    folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch, script: str, fault: str
) -> None:
    program = folder / "python"
    program.write_text(script)
    program.chmod(0o755 if script else 0o644)
    monkeypatch.setattr(sys, "executable", str(program))
    guard = replace(Policy.default().guard, cri_socket=str(folder / "cri.sock"), stop_grace_s=0)
    assert await stop_containers({"a": "ml/a"}, guard, "tested", patience_s=0.1) == frozenset()
    assert fault in str(log.one("containers not stopped").fields["fault"])
