"""Programs in real containers find the driver: by environment, without one, and where the pod is in the way."""

from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.injection.driver_mounts import HWCAPS_PLACES, TREE_PLACES
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch
from tests.support.driver_root import STUBS, compile_stub, make_driver_root
from tests.support.image import Entry, File, ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.pods import ContainerSpec

pytestmark = [pytest.mark.containerd, pytest.mark.usefixtures("shared_daemon")]

V = "580.95.05"
NAMES = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")
LAST = "/opt/nri-gpu/nvidia/lib64"
OWN = "/opt/app/lib"
SMI = [
    f"nvidia-smi: SIMULATION of driver {V}, no GPU behind it",
    *("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidiactl"),
]

only_x86_64 = pytest.mark.skipif(not HWCAPS_PLACES, reason="glibc has hwcaps levels on x86-64 only")


class Compiled(Struct, frozen=True):
    """What the compiler made, once for all tests: a driver, and a library of the image's own."""

    driver: Path
    library: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    options = ("-shared", "-fPIC", "-Wl,-soname,libapp.so.1", '-DSTUB_NAME="libapp"')
    return Compiled(
        make_driver_root(folder / "driver", V, compiled=True),
        compile_stub(STUBS / "library.c", folder / "libapp.so.1", V, *options),
    )


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch, compiled: Compiled) -> Launch:
    return replace(module_launch, driver_root=compiled.driver)


class Granted(Struct, frozen=True):
    """A running container that holds GPU 1."""

    node: Containerd
    id: ContainerId

    def run(self, *command: str) -> list[str]:
        """Output lines of a command that must succeed."""
        done = self.node.cri.execute(self.id, *command)
        assert done.code == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    def finds(self, folder: str) -> None:
        """Whether every library is found in a folder."""
        found = {name: "libcuda.so.1" if name == "libcuda.so" else name for name in NAMES}
        assert self.run("/bin/probe", *NAMES) == [f"{name} -> {folder}/{found[name]}" for name in NAMES]

    @property
    def library_path(self) -> str:
        return self.node.cri.status(self.id).env["LD_LIBRARY_PATH"]


@pytest.fixture(scope="module")
def images(module_node: Containerd, compiled: Compiled, probe: dict[str, Entry]) -> dict[str, str]:
    """Images with glibc and the probe: one that sets nothing, one with a library path and a library of its own."""
    own = probe | {f"{OWN}/libapp.so.1": File(compiled.library.read_bytes(), 0o755)}
    plain = ImageSpec("localhost/nri-gpu/glibc:1", extra=probe)
    setting = ImageSpec("localhost/nri-gpu/glibc-own-path:1", {"LD_LIBRARY_PATH": OWN}, extra=own)
    for image in (plain, setting):
        module_node.import_image(image)
    return {"plain": plain.name, "own path": setting.name}


def grant(node: Containerd, spec: ContainerSpec) -> Granted:
    return Granted(node, node.cri.run(node.cri.asking("device=1"), spec))


@pytest.mark.short
def test_with_the_containers_environment(node: Containerd, images: dict[str, str]) -> None:
    container = grant(node, ContainerSpec(image=images["plain"]))
    container.finds(LIBRARIES)
    assert container.library_path == LIBRARIES
    assert container.run("/bin/sh", "-c", "nvidia-smi") == SMI


def test_an_image_with_a_library_path_of_its_own_keeps_it(node: Containerd, images: dict[str, str]) -> None:
    container = grant(node, ContainerSpec(image=images["own path"]))
    assert container.library_path == f"{LIBRARIES}:{OWN}"
    container.finds(LIBRARIES)
    assert container.run("/bin/probe", "libapp.so.1") == [f"libapp.so.1 -> {OWN}/libapp.so.1"]


@only_x86_64
def test_a_pod_that_overrides_its_images_path(node: Containerd, images: dict[str, str]) -> None:
    """The runtime then lists the variable twice, and NRI's adjustment reaches only the first, which loses.

    opencontainers/runtime-tools generate (addEnv), containerd/nri pkg/runtime-tools/generate (AdjustEnv). No reply
    gets around it; what needs no environment still finds the driver.
    """
    container = grant(node, ContainerSpec(image=images["own path"], env={"LD_LIBRARY_PATH": "/pod/lib"}))
    assert container.library_path == "/pod/lib"
    container.finds(HWCAPS_PLACES[0])
    assert container.run("/bin/sh", "-c", "nvidia-smi") == SMI


def test_volumes_of_the_pod_in_the_usual_places_stay(node: Containerd, images: dict[str, str], tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "mine").write_text("precious")
    taken = (*HWCAPS_PLACES, TREE_PLACES[0])
    container = grant(node, ContainerSpec(image=images["plain"], mounts=dict.fromkeys(taken, str(volume))))
    for place in taken:
        assert container.run("/bin/cat", f"{place}/mine") == ["precious"]
    container.finds(LAST)
    assert container.library_path == LAST
    assert container.run("/bin/sh", "-c", "nvidia-smi") == SMI
    container.run("/bin/touch", f"{taken[0]}/new")
    assert sorted(each.name for each in volume.iterdir()) == ["mine", "new"]
