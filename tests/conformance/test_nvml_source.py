"""The daemon on NVML (a fake library, the real binding): a driver that hangs stalls no container."""

from pathlib import Path

from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.nvml import Act, FakeGpu, build_fake_nvml

pytestmark = on_newest


def test_a_driver_that_hangs_stalls_nobody(node: Containerd, tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "driver")
    build_fake_nvml(root, [FakeGpu(), FakeGpu()], [Act("nvmlDeviceGetName", "hang")])
    with NriGpu(Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)) as daemon:
        daemon.wait_session(1)
        assert "has just started" in node.cri.refused("device=1").details
        node.cri.run(node.cri.run_pod())
        assert "nvmlDeviceGetName" in daemon.wait_logged("inventory not refreshed")
        assert "nvmlDeviceGetName" in node.cri.refused("device=1").details
        daemon.wait_ready()
        assert "connection ended" not in daemon.log()  # as it is where the runtime waited 2 s in vain
