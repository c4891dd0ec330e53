"""NVIDIA's own MPS control daemon under ours: started, limited, asked and ended. Its server finds no device here."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.mps.mps_daemon import CONTROL, PROBE, SERVER, SMI, MpsDaemon, MpsTools
from nri_gpu.mps.mps_folders import DaemonFolder
from nri_gpu.policy.mps_settings import MpsSettings
from tests.support.debian_driver import DRIVERS, debian_driver
from tests.support.mps import client_files, end_all
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.driver,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers of these tests are for x86-64"),
]

UUID = GpuUuid("GPU-0")


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-mps-") as made, client_files(Path(made)):
        yield Path(made)
        end_all(Path(made))


@pytest.fixture
def tools(tmp_path: Path) -> MpsTools:
    """NVIDIA's programs, but for the one that needs a GPU to set its compute mode."""
    root = debian_driver("550")
    for program in (f"usr/bin/{CONTROL}", f"usr/sbin/{SERVER}"):
        (tmp_path / Path(program).name).symlink_to(root / program)
    (tmp_path / SMI).write_text("#!/bin/sh\n")
    (tmp_path / SMI).chmod(0o755)
    return MpsTools(tmp_path, root / "usr/lib/x86_64-linux-gnu/nvidia" / DRIVERS["550"].folder)


async def test_it_serves_with_limits_and_says_why_a_server_does_not_start(state: Path, tools: MpsTools) -> None:
    folder = DaemonFolder(state, UUID, "a")
    daemon = MpsDaemon(folder, lambda: DaemonFolder(state, UUID, "next"))
    daemon.prepare()
    await daemon.start(tools, MpsSettings(enabled=True, most_threads_percent=60, most_memory_mib=512))
    assert daemon.alive
    assert await tools.control(folder.uuid, folder.pipe, PROBE) == "60.0"
    assert "512M" in await tools.control(folder.uuid, folder.pipe, "get_default_device_pinned_mem_limit 0")
    await tools.control(folder.uuid, folder.pipe, "start_server -uid 0")
    output = folder.log / "output"
    wait_for("its server", lambda: "no CUDA-capable device is detected" in output.read_text(), 10)
    assert [each.name for each in folder.log.iterdir()] == ["output"]
    await daemon.end(tools)
    assert not daemon.alive
