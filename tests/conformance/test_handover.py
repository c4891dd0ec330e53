"""Exclusive GPUs from one pod to the next, while the driver (a fake library) still shows processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import Launch
from tests.support.driver_root import make_driver_root
from tests.support.kernel import NriGpuOnNvidia
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, build_fake_nvml, configure
from tests.support.nvml.build import DRIVER
from tests.support.waiting import wait_for

pytestmark = on_newest

PATIENCE_S: Final = 10.0  # long before the next regular look, which is a minute away, and the end of the grace


def test_the_next_pod_waits_for_the_last_process(node: Containerd, tmp_path: Path) -> None:
    root = build_fake_nvml(make_driver_root(tmp_path / "driver", DRIVER), [FakeGpu(), FakeGpu()])
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    with NriGpuOnNvidia(launch, DRIVER) as daemon:
        daemon.wait_staged()
        daemon.wait_logged("inventory changed gpus=2")

        def wait_unavailable(why: str) -> None:
            wait_for(why, lambda: daemon.status()["gpus"][0]["unavailable"] == why, PATIENCE_S)

        first = node.cri.run_asking("device=0", "first")
        configure(root, [FakeGpu(running=(2, 0)), FakeGpu()])
        node.cri.stop(first)

        said = "just released by default/first: 2 processes still hold it"
        wait_unavailable(said)
        assert said in daemon.verb("status").stdout
        with pytest.raises(CriError, match=rf"\[gpu-busy\]: GPU 0 \(GPU-.*\) was {said}; other pods can have it once"):
            node.cri.run_asking("device=0", "second")
        node.cri.run_asking("1", "beside")  # the other GPU

        configure(root, [FakeGpu(), FakeGpu()])
        wait_unavailable("")
        node.cri.run_asking("device=0", "third")
        assert "held exclusively by default/third" in daemon.status()["gpus"][0]["unavailable"]
