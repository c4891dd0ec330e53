"""The daemon on NVML (a fake library, the real binding): a driver that hangs stalls no container."""

import time
from pathlib import Path

from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.nvml import Act, FakeGpu, build_fake_nvml

pytestmark = on_newest

PROMPT_S = 1.5  # a create takes about 10 ms; the runtime gives up on us after 2 s


def test_a_driver_that_hangs_stalls_nobody(node: Containerd, tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "driver")
    build_fake_nvml(root, [FakeGpu(), FakeGpu()], [Act("nvmlDeviceGetName", "hang")])
    with NriGpu(Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)) as daemon:
        daemon.wait_ready()
        began = time.monotonic()
        assert "has just started" in node.cri.refused("device=1").details
        node.cri.run(node.cri.run_pod())
        assert time.monotonic() - began < PROMPT_S
        assert "nvmlDeviceGetName" in daemon.wait_logged("inventory not refreshed")
        assert "nvmlDeviceGetName" in node.cri.refused("device=1").details
