"""On a machine with an NVIDIA GPU: two containers of one MPS daemon, with 10 and 30 GiB of its memory.

`make test-gpu`, as test_real_gpu.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import ON_GPU, Record, driver_root, program_image, serving
from tests.support import mps, packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, NriGpu
from tests.support.pods import ContainerSpec

pytestmark = ON_GPU
IMAGE = "localhost/nri-gpu/mps_alloc:1"
START_S = 120.0  # a GPU that sleeps takes its time


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mps.shared(tmp_path_factory.mktemp("run")) as folder:
        yield folder


@pytest.fixture(scope="module")
def gpu_node(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    assert run_folder.is_dir()  # before containerd is there
    with Containerd(packages.find_any()) as node:
        node.import_image(program_image(tmp_path_factory.mktemp("program"), "mps_alloc"))
        yield node


@pytest.fixture
def real(gpu_node: Containerd, run_folder: Path) -> Iterator[NriGpu]:
    launch = Launch(run_folder / "d", gpu_node.nri_socket, topology=None, driver_root=driver_root())
    launch = launch.with_policy("[mps]\nenabled = true\nlinger_s = 20\n")
    with mps.client_files(launch.state, 1024), serving(launch) as daemon:
        yield daemon
        gpu_node.cri.remove_all()
        daemon.wait_logged("MPS daemon ended gpu_uuid", START_S)
    mps.end_all(launch.state)


def run(node: Containerd, name: str, share: str) -> ContainerId:
    pod = node.cri.asking(f"device=0;mode=mps;sharing=memory:{share}", name)
    return node.cri.run_persistently(pod, ContainerSpec(image=IMAGE), "is not up yet", START_S)


def allocate(node: Containerd, container: ContainerId, gib: int) -> str:
    said = node.cri.execute(container, "/bin/sh", "-c", f"/bin/mps_alloc {gib} < /dev/null", timeout_s=120)
    assert said.code in (0, 1), said.stderr
    return said.stdout.strip()


def test_ten_and_thirty_gib_of_one_gpu(gpu_node: Containerd, real: NriGpu, record: Record) -> None:
    (gpu,) = real.gpus()["gpus"][:1]
    if gpu["mig_enabled"]:
        pytest.skip("GPU 0 is in MIG mode")
    if gpu["memory_bytes"] < 45 * 2**30:
        pytest.skip(f"GPU 0 has {gpu['memory_bytes'] >> 30} GiB, and shares of 10 and 30 need 45")
    small, large = run(gpu_node, "small", "10Gi"), run(gpu_node, "large", "30Gi")
    assert allocate(gpu_node, small, 8) == "allocated 8 GiB"
    assert allocate(gpu_node, large, 28) == "allocated 28 GiB"
    assert allocate(gpu_node, small, 12) == "cuMemAlloc_v2: CUDA error 2"  # out of memory
    assert allocate(gpu_node, large, 32) == "cuMemAlloc_v2: CUDA error 2"
    assert mps.noted_pid(real.launch.state, gpu["uuid"])  # EXCLUSIVE_PROCESS: without it neither had allocated
    asked = gpu_node.cri.execute(small, "/bin/sh", "-c", "ls /tmp/nvidia-mps")
    assert "control" in asked.stdout.split()
    record("8 of 10 and 28 of 30 GiB allocated; 12 and 32 refused")
