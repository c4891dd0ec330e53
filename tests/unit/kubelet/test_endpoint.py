"""Registration and what undoes it: each trap of the reference, with a kubelet that has it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest

from nri_gpu.kubelet import endpoint
from nri_gpu.policy.model import KubeletSettings, Registration
from tests.support.kubelet import Kubelet
from tests.unit.kubelet.station import GPU, Station
from tests.unit.runtime.log import Log

WATCHER = KubeletSettings(registration=Registration.WATCHER)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are waited for; how long nothing is done about them only makes tests long."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(endpoint, "WAIT_MAX_S", 0.1)
    monkeypatch.setattr(endpoint, "LOOK_EVERY_S", 0.05)


def ours(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("nri-gpu-*.sock"))


async def said(log: Log, words: str) -> None:
    """Until a warning has them; the test's own deadline is the limit."""
    while not any(words in line.fields.get("fault", "") for line in log.warnings()):  # noqa: ASYNC110 - no event of it
        await asyncio.sleep(0.01)


async def test_options_are_answered_while_register_waits(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, Station(folder):
        await kubelet.wait_healthy(GPU, 4)
        assert kubelet.clients[GPU].options.get_preferred_allocation_available
        assert not kubelet.clients[GPU].options.pre_start_required
        assert kubelet.registered == 1
        assert not log.warnings()


async def test_a_kubelet_that_comes_later_is_noticed(folder: Path, log: Log) -> None:
    async with Station(folder), Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
    assert len(log.said("not registered with the kubelet, trying again")) <= 2  # no folder, then no socket


@pytest.mark.parametrize("keyed_by_resource", [True, False], ids=["before 135437", "after 135437"])
async def test_restarts_and_broken_streams_are_mended(folder: Path, keyed_by_resource: bool) -> None:
    async with Kubelet(folder, keyed_by_resource=keyed_by_resource) as kubelet, Station(folder):
        await kubelet.wait_healthy(GPU, 4)
        names = {kubelet.clients[GPU].path.name}
        for undo in (kubelet.restart, lambda: kubelet.end_stream(GPU), kubelet.restart):
            await undo()
            await kubelet.wait_healthy(GPU, 4)
            names.add(kubelet.clients[GPU].path.name)
        assert len(names) == 4  # a fresh name each time
        assert ours(kubelet.dir) == [kubelet.clients[GPU].path.name]
    assert ours(kubelet.dir) == []


async def test_the_folder_is_made_anew(folder: Path) -> None:
    async with Kubelet(folder) as kubelet, Station(folder):
        await kubelet.wait_healthy(GPU, 4)
        await kubelet.stop()
        shutil.rmtree(kubelet.dir)
        await kubelet.start()
        await kubelet.wait_healthy(GPU, 4)


async def test_a_refusal_is_said_once_and_tried_again(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, Station(folder):
        kubelet.refuse = "requested API version is not supported"
        await kubelet.restart()
        await kubelet.wait("second refusal", lambda: kubelet.refused >= 2)
        kubelet.refuse = ""
        await kubelet.wait_healthy(GPU, 4)
    (line,) = (line for line in log.warnings() if "version" in line.fields["fault"])
    assert line.fields["fault"].endswith("UNKNOWN: requested API version is not supported")


async def test_the_plugin_watcher_finds_us(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, Station(folder, settings=WATCHER):
        await kubelet.wait_healthy(GPU, 4)
        first = kubelet.clients[GPU].path
        assert first.parent == kubelet.registry
        await kubelet.restart()
        await kubelet.wait_healthy(GPU, 4)
        kubelet.refuse = "a refused plugin is known, and not asked again"
        await kubelet.restart()
        await kubelet.wait("second refusal", lambda: kubelet.refused >= 2)  # by a socket made anew
        kubelet.refuse = ""
        await kubelet.wait_healthy(GPU, 4)


async def test_a_path_too_long_is_said_in_a_sentence(folder: Path, log: Log) -> None:
    deep = folder / ("d" * 90)
    (deep / "device-plugins").mkdir(parents=True)
    async with Station(deep):
        await said(log, "longer than the 107 bytes")


async def test_nvidias_plugin_is_not_fought(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet:
        rival = socket.socket(socket.AF_UNIX)
        rival.bind(str(kubelet.dir / "nvidia-gpu.sock"))
        rival.listen()
        async with Station(folder):
            await said(log, "NVIDIA's device plugin")
            assert kubelet.registered == 0
            rival.close()  # what it left behind is of nobody
            await kubelet.wait_healthy(GPU, 4)


async def test_stale_sockets_of_ours_go_and_those_of_others_stay(folder: Path) -> None:
    async with Kubelet(folder) as kubelet:
        for name in ("nri-gpu-gpu-dead.sock", "other.sock"):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(kubelet.dir / name))
        async with Station(folder):
            await kubelet.wait_healthy(GPU, 4)
            assert ours(kubelet.dir) == [kubelet.clients[GPU].path.name]
            assert (kubelet.dir / "other.sock").exists()


async def test_a_rival_of_the_same_name_is_suspected(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, Station(folder):
        for _ in range(endpoint.RIVALS_AFTER):
            await kubelet.wait_healthy(GPU, 4)
            await kubelet.end_stream(GPU)
        await kubelet.wait_healthy(GPU, 4)
        assert any("another device plugin" in line.fields["fault"] for line in log.warnings())
