"""NVIDIA's own driver in containers: programs load it and start CUDA, which finds no device."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import cdi
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, NriGpu
from tests.support.debian_driver import debian_driver, version_of
from tests.support.driver_root import STUBS, compile_stub
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = [
    on_newest,
    pytest.mark.driver,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers of these tests are for x86-64"),
]

# Drivers in a root, the one that its alternative is set to, and the CUDA that this one brings.
ROOTS = {
    "470": (("470",), 11040),
    "535": (("535",), 12020),
    "550": (("550",), 12040),
    "550 and 535": (("550", "535"), 12020),
}
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@pytest.fixture(scope="module", params=ROOTS)
def driver(request: pytest.FixtureRequest) -> tuple[Path, str, int]:
    """A root, and the version and CUDA of the driver that is to be found there."""
    names, cuda = ROOTS[request.param]
    root = debian_driver(*names, alternative=names[-1] if len(names) > 1 else "")
    return root, version_of(root, names[-1]), cuda


@pytest.fixture
def launch(launch: Launch, driver: tuple[Path, str, int]) -> Launch:
    return replace(launch, driver_root=driver[0])


@pytest.fixture(scope="module")
def image(module_node: Containerd, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cuinit")
    # So that the image has them: every image with CUDA programs has a whole C library.
    linked = (f"-l:{name}" for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"))
    program = compile_stub(STUBS / "cuinit.c", folder / "cuinit", "", "-Wl,--no-as-needed", *linked)
    spec = ImageSpec("localhost/nri-gpu/cuinit:1", extra=glibc_files({"/bin/cuinit": program}))
    module_node.import_image(spec)
    return spec.name


def starts_cuda(node: Containerd, container: ContainerId, cuda: int) -> None:
    done = node.cri.execute(container, "/bin/cuinit")
    assert done.stdout + done.stderr == f"{LIBRARIES}/libcuda.so.1 CUDA {cuda}, cuInit {NO_DEVICE}\n"


def test_a_container_by_nri(node: Containerd, daemon: NriGpu, driver: tuple[Path, str, int], image: str) -> None:
    _, version, cuda = driver
    container = node.cri.run_asking("device=1; mode=shared; capabilities=compute,utility,video,graphics", image=image)
    starts_cuda(node, container, cuda)
    listed = node.cri.execute(container, "/bin/ls", LIBRARIES).stdout.split()
    assert {f"libcuda.so.{version}", f"libnvcuvid.so.{version}", f"libGLX_nvidia.so.{version}"} <= set(listed)
    assert {match[1] for name in listed if (match := re.search(r"\.so\.(\d{3}\..*)", name))} == {version}


def test_a_container_by_cdi(node: Containerd, driver: tuple[Path, str, int], image: str, tmp_path: Path) -> None:
    root, _, cuda = driver
    with cdi.specification(node.layout.cdi, root, tmp_path / "stage") as file:
        assert f"/{driver[1]}-" in json.dumps(json.loads(file.read_text())["containerEdits"]["mounts"])
        pod = node.cri.run_pod(PodSpec(name="by-cdi"))
        container = node.cri.run(pod, ContainerSpec(cdi_devices=("nvidia.com/gpu=0",), image=image))
        starts_cuda(node, container, cuda)


@pytest.mark.parametrize("driver", ["550"], indirect=True)
def test_a_container_runs_its_own_mps_daemon(node: Containerd, daemon: NriGpu, image: str) -> None:
    """With the line of docs/loader.md; its server, which is found by PATH, then finds no device."""
    container = node.cri.run_asking("device=1; mode=shared", image=image)
    script = f"""
        export CUDA_MPS_PIPE_DIRECTORY=/pipe CUDA_MPS_LOG_DIRECTORY=/log PATH=$PATH:{LIBRARIES}/bin
        mkdir /pipe /log
        nvidia-cuda-mps-control -d
        echo start_server -uid 0 | nvidia-cuda-mps-control
        for try in 1 2 3 4 5 6 7 8 9; do grep "no CUDA-capable device" /log/* && break; sleep 1; done
        cat /log/*
        echo quit | nvidia-cuda-mps-control
    """
    done = node.cri.execute(container, "/bin/sh", "-c", script, timeout_s=60)
    assert "Driver initialization failed with: no CUDA-capable device is detected" in done.stdout, done
