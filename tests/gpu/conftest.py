"""What the tests on a machine with an NVIDIA GPU share: its driver root, programs in an image, the daemon."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.gpu.programs import program
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec

ON_GPU: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not Path("/proc/driver/nvidia/version").exists(), reason="no NVIDIA driver is loaded on this machine"
    ),
]
IMAGE: Final = "localhost/nri-gpu/vector_add:1"
Record = Callable[[str], None]


def driver_root() -> Path:
    named = os.environ.get("NRI_GPU_DRIVER_ROOT", "")
    flat = Path("/usr/local/nvidia")
    return Path(named) if named else flat if list(flat.glob("lib*/libcuda.so.*")) else Path("/")


def program_image(folder: Path, *names: str) -> ImageSpec:
    """An image called after the first, with `/bin/NAME` of each; says NVIDIA_VISIBLE_DEVICES=all as CUDA images do."""
    libraries = Path("/lib/x86_64-linux-gnu")
    libraries = libraries if libraries.exists() else Path("/usr/lib64")
    # Libraries that the driver's own need, but a minimal image has not.
    needed = (libraries / each for each in ("libm.so.6", "libpthread.so.0", "librt.so.1"))
    files = {str(each): each for each in needed if each.exists()}
    files |= {f"/bin/{name}": program(name, folder) for name in names}
    return ImageSpec(f"localhost/nri-gpu/{names[0]}:1", env={"NVIDIA_VISIBLE_DEVICES": "all"}, extra=glibc_files(files))


@contextmanager
def serving(launch: Launch) -> Iterator[NriGpu]:
    """A daemon that knows the GPUs and has staged the driver, which takes its time."""
    with NriGpu(launch) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("inventory changed", 60)
        daemon.wait_logged("driver files staged", 120)
        yield daemon


@pytest.fixture(scope="module")
def gpu_image(tmp_path_factory: pytest.TempPathFactory) -> ImageSpec:
    return program_image(tmp_path_factory.mktemp("program"), "vector_add", "bad_access")


@pytest.fixture(scope="module")
def gpu_node(gpu_image: ImageSpec) -> Iterator[Containerd]:
    with Containerd(packages.find_any()) as node:
        node.import_image(gpu_image)
        yield node


@pytest.fixture
def real(gpu_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    """A daemon on the machine's own driver."""
    with serving(Launch(tmp_path / "d", gpu_node.nri_socket, topology=None, driver_root=driver_root())) as daemon:
        yield daemon
    gpu_node.cri.remove_all()


@pytest.fixture
def whole(real: NriGpu) -> int:
    """The index of a GPU that is not in MIG mode."""
    found = [gpu["index"] for gpu in real.gpus()["gpus"] if not gpu["mig_enabled"]]
    if not found:
        pytest.skip("every GPU is in MIG mode")
    return int(found[0])


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Puts a line into the report."""
    return lambda line: record_property("found", line)
