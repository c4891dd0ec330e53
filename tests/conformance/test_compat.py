"""A newer CUDA than the driver's in real containers: by real loaders, where the image needs it and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.injection.driver_mounts import HWCAPS_PLACES
from tests.support import compat
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import STUBS, compile_stub, make_driver_root
from tests.support.glibc import glibc_files
from tests.support.image import ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest

pytestmark = on_newest

V, NEWER = "580.95.05", "600.10.01"  # the simulated node has CUDA 13.0
PLACE, TREE = "/opt/nri-gpu/compat", LIBRARIES
# As an image for CUDA 14.0 has it: new enough, or an older branch that its own package would run on.
WANTS_14 = {"CUDA_VERSION": "14.0.1", "NVIDIA_REQUIRE_CUDA": "cuda>=14.0 brand=tesla,driver>=470,driver<471"}
WANTS_13 = {"CUDA_VERSION": "13.0.1", "NVIDIA_REQUIRE_CUDA": "cuda>=13.0 brand=tesla,driver>=470,driver<471"}


class Compiled(Struct, frozen=True):
    """What the compiler made, once for all tests."""

    driver: Path
    packages: Path
    probe: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    packages = folder / "packages"
    compat.make_package(packages, "14.0", NEWER, compat.note("14.0", (550, 580)))
    return Compiled(
        make_driver_root(folder / "driver", V, compiled=True),
        packages,
        compile_stub(STUBS / "which.c", folder / "which", V),
    )


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch, compiled: Compiled) -> Launch:
    return replace(module_launch, driver_root=compiled.driver).with_policy(f'[compat]\ndir = "{compiled.packages}"\n')


@pytest.fixture(autouse=True)
def serving(shared_daemon: NriGpu) -> None:
    shared_daemon.wait_logged("CUDA compatibility packages staged")


def image(node: Containerd, compiled: Compiled, name: str, env: dict[str, str]) -> str:
    spec = ImageSpec(f"localhost/nri-gpu/compat-{name}:1", env, extra=glibc_files({"/bin/which-cuda": compiled.probe}))
    node.import_image(spec)
    return spec.name


def run(node: Containerd, name: str, **fields: Any) -> ContainerId:  # noqa: ANN401 - any field of its spec
    return node.cri.run_asking("device=1; mode=shared", image=name, **fields)


def loaded(node: Containerd, container: ContainerId, *command: str) -> str:
    done = node.cri.execute(container, *command, "/bin/which-cuda")
    assert done.code == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_the_package_where_the_image_is_newer_and_the_drivers_own_where_not(
    node: Containerd, compiled: Compiled
) -> None:
    newer = run(node, image(node, compiled, "14", WANTS_14))
    assert loaded(node, newer) == f"{PLACE}/libcuda.so.1 CUDA 14000"
    assert node.cri.status(newer).env["LD_LIBRARY_PATH"] == f"{PLACE}:{TREE}"
    behind = node.cri.execute(newer, "/bin/which-cuda", "libnvidia-ml.so.1")
    assert behind.stdout.strip() == f"{TREE}/libnvidia-ml.so.1 CUDA 0"
    compiler = node.cri.execute(newer, "/bin/which-cuda", "libnvidia-ptxjitcompiler.so.1")
    assert compiler.stdout.startswith(f"{PLACE}/libnvidia-ptxjitcompiler.so.1")
    assert not node.cri.status(newer).oci.get("hooks")

    same = run(node, image(node, compiled, "13", WANTS_13))
    assert loaded(node, same) == f"{TREE}/libcuda.so.1 CUDA 13000"
    assert node.cri.execute(same, "/bin/ls", PLACE).code != 0
    plain = run(node, image(node, compiled, "plain", {}))
    assert loaded(node, plain) == f"{TREE}/libcuda.so.1 CUDA 13000"


def test_before_an_images_own_package_and_for_any_user(node: Containerd, compiled: Compiled) -> None:
    own = WANTS_14 | {"LD_LIBRARY_PATH": "/usr/local/cuda/compat/lib:/usr/local/nvidia/lib64"}
    container = run(node, image(node, compiled, "ngc", own), user=1000, readonly_rootfs=True)
    assert loaded(node, container) == f"{PLACE}/libcuda.so.1 CUDA 14000"
    assert node.cri.execute(container, "/bin/touch", f"{PLACE}/new").code != 0


@pytest.mark.skipif(not HWCAPS_PLACES, reason="glibc has hwcaps levels on x86-64 only")
def test_a_program_without_environment_has_the_drivers_own(node: Containerd, compiled: Compiled) -> None:
    """Documented: nothing but the variable wins over what a loader finds by itself."""
    container = run(node, image(node, compiled, "14", WANTS_14))
    done = node.cri.execute(container, "/bin/env", "-i", "/bin/which-cuda")
    assert done.stdout.strip() == f"{HWCAPS_PLACES[0]}/libcuda.so.1 CUDA 13000"
