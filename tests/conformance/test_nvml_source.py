"""The daemon on NVML (a fake library, the real binding): a driver that hangs or is half there stalls no container."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.nvml import Act, FakeGpu, build_fake_nvml

pytestmark = on_newest

GPUS = tuple(FakeGpu(minor=n, uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(4))
PROMPT_S = 1.5  # a create takes about 10 ms; the runtime gives up on us after 2 s


@contextmanager
def serving(node: Containerd, base: Path, *faults: Act) -> Iterator[NriGpu]:
    root = build_fake_nvml(make_driver_root(base / "driver"), GPUS, faults)
    with NriGpu(Launch(base / "d", node.nri_socket, topology=None, driver_root=root)) as daemon:
        daemon.wait_ready()
        yield daemon


def ask(node: Containerd) -> str:
    """What a container that asks is told; here it is always a refusal, because no kernel module is loaded."""
    return node.cri.refused("device=1").details


def test_gpus_come_from_nvml_and_majors_from_the_kernel(node: Containerd, tmp_path: Path) -> None:
    with serving(node, tmp_path) as daemon:
        daemon.wait_logged("inventory changed gpus=4")
        assert [gpu["uuid"] for gpu in daemon.gpus()["gpus"]] == [gpu.uuid for gpu in GPUS]
        assert "kernel module nvidia is not loaded" in ask(node)


def test_a_driver_that_hangs_stalls_nobody(node: Containerd, tmp_path: Path) -> None:
    with serving(node, tmp_path, Act("nvmlDeviceGetName", "hang")) as daemon:
        began = time.monotonic()
        assert "has just started" in ask(node)
        node.cri.run(node.cri.run_pod())
        assert time.monotonic() - began < PROMPT_S
        assert "nvmlDeviceGetName" in daemon.wait_logged("inventory not refreshed")
        assert "nvmlDeviceGetName" in ask(node)
