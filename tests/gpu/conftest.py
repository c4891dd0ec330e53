"""What the tests on a machine with an NVIDIA GPU share: its driver root, programs in an image, the daemon."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gpu.programs import program
from tests.support.daemon import Launch, NriGpu
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec


def driver_root() -> Path:
    named = os.environ.get("NRI_GPU_DRIVER_ROOT", "")
    flat = Path("/usr/local/nvidia")
    return Path(named) if named else flat if list(flat.glob("lib*/libcuda.so.*")) else Path("/")


def program_image(name: str, folder: Path) -> ImageSpec:
    """An image with `/bin/NAME`, of NAME.c beside this file, that says NVIDIA_VISIBLE_DEVICES=all as CUDA images do."""
    libraries = Path("/lib/x86_64-linux-gnu")
    libraries = libraries if libraries.exists() else Path("/usr/lib64")
    # Libraries that the driver's own need, but a minimal image has not.
    needed = (libraries / each for each in ("libm.so.6", "libpthread.so.0", "librt.so.1"))
    files = {f"/bin/{name}": program(name, folder), **{str(each): each for each in needed if each.exists()}}
    return ImageSpec(f"localhost/nri-gpu/{name}:1", env={"NVIDIA_VISIBLE_DEVICES": "all"}, extra=glibc_files(files))


@contextmanager
def serving(launch: Launch) -> Iterator[NriGpu]:
    """A daemon that knows the GPUs and has staged the driver, which takes its time."""
    with NriGpu(launch) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("inventory changed", 60)
        daemon.wait_logged("driver files staged", 120)
        yield daemon
