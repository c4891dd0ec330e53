"""The daemon's device plugin: off unless wanted, and never the end of the other half."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.kubelet.endpoint import Endpoint
from nri_gpu.policy.model import KubeletSettings
from nri_gpu.verbs.kubelet_keeper import KubeletKeeper
from tests.support.kubelet import Kubelet
from tests.unit.kubelet.station import GPU, Halves, Station
from tests.unit.kubelet.test_endpoint import said
from tests.unit.runtime.log import Log


def test_grpc_is_imported_only_where_it_is_wanted() -> None:
    program = "import nri_gpu.verbs.run, sys; sys.exit('grpc' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False, timeout=60).returncode == 0


async def test_without_grpcio_it_says_what_to_install(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nri_gpu.kubelet.endpoint", None)
    halves = Halves()
    running = asyncio.create_task(KubeletKeeper(halves.board, halves.plugin, KubeletSettings(enabled=True)).run())
    await said(log, "kubernetes extra")
    assert not running.done()  # the other half serves on
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert "install the kubernetes extra" in log.one("no device plugin for the kubelet").fields["fault"]


async def test_a_bug_of_ours_ends_one_session_and_not_the_daemon(
    folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Endpoint._fresh_path
    bugs = [ZeroDivisionError()]

    def once(self: Endpoint) -> Path:
        if bugs:
            raise bugs.pop()
        return whole(self)

    monkeypatch.setattr(Endpoint, "_fresh_path", once)
    async with Kubelet(folder) as kubelet, Station(folder):
        await kubelet.wait_healthy(GPU, 4)
    assert isinstance(log.one("kubelet session ended by a bug of ours").exception, ZeroDivisionError)
