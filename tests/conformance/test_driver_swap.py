"""A driver that is replaced while containers are created: each gets files of one generation, and none is lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec

pytestmark = on_newest

VERSIONS = ("570.195.03", "580.95.05")
CONTAINERS = 100
PODS = 10
AT_A_TIME = 4
SWAP_EVERY_S = 0.2
# The only sentence that a container may be refused with: the files changed in the middle of staging them.
GATE = "changed while it was staged: a driver is being installed"
# What a program in the container sees: the version that nvidia-smi is of, and those that the libraries are of.
PROBE = f"nvidia-smi | head -n 1; ls {LIBRARIES} | sed -n 's/.*\\.so\\.\\([0-9]*\\.[0-9.]*\\)$/\\1/p' | sort -u"


class Drivers(Struct, frozen=True):
    """Two driver roots, and the link by which the daemon knows one of them."""

    base: Path

    @property
    def root(self) -> Path:
        return self.base / "driver"

    def install(self, version: str) -> None:
        """As a driver container does it, in one step."""
        fresh = self.base / "fresh"
        fresh.symlink_to(version)
        fresh.rename(self.root)

    def move(self) -> None:
        """As nobody should: the folder renamed away, and another one put in its place under the same name."""
        here = self.root.resolve()
        here.rename(self.base / "away")
        (self.base / "copy").rename(here)
        (self.base / "away").rename(self.base / "copy")


@pytest.fixture
def drivers(tmp_path: Path) -> Drivers:
    for version in VERSIONS:
        make_driver_root(tmp_path / version, version)
    made = Drivers(tmp_path)
    make_driver_root(tmp_path / "copy", VERSIONS[0])
    made.install(VERSIONS[0])
    return made


@pytest.fixture
def launch(node: Containerd, tmp_path: Path, drivers: Drivers) -> Launch:
    launch = Launch(tmp_path / "d", node.nri_socket, driver_root=drivers.root)
    return launch.with_policy("[inventory]\nrefresh_s = 1\n")  # and so the driver is looked at each second


@pytest.fixture
def swapping(drivers: Drivers, daemon: NriGpu) -> Iterator[None]:
    """Swaps by link and by rename in turn, now noticed by a look and now told by a signal, until the test is done."""
    done = threading.Event()

    def swap() -> None:
        turn = 0
        while not done.wait(SWAP_EVERY_S):
            turn += 1
            if turn % 4 == 0:
                drivers.install(VERSIONS[0])
                drivers.move()
            else:
                drivers.install(VERSIONS[turn % 2])
            if turn % 3:
                daemon.hang_up()

    thread = threading.Thread(target=swap)
    thread.start()
    yield
    done.set()
    thread.join()


def pod(node: Containerd, number: int = 0) -> Pod:
    return node.cri.asking("1; mode=shared", f"p{number}")


def created(node: Containerd, of: Pod, number: int = 0) -> ContainerId | None:
    """A container that runs, or None where the gate refused it."""
    try:
        return node.cri.run(of, ContainerSpec(name=f"c{number}"))
    except CriError as error:
        assert GATE in error.details
        return None


@pytest.mark.usefixtures("swapping")
def test_each_of_a_hundred_containers_has_one_driver(node: Containerd, daemon: NriGpu) -> None:
    pods = [pod(node, number) for number in range(PODS)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        numbers = range(CONTAINERS)
        found = list(pool.map(lambda number: created(node, pods[number % PODS], number), numbers))
        containers = [each for each in found if each]
        assert len(containers) > CONTAINERS // 2
        versions = list(pool.map(lambda container: one_driver(node, daemon, container), containers))
        # A look between the renames of `move` finds no driver, and a simulated node grants without one until the next.
        assert versions.count("") < CONTAINERS // 2
        assert set(filter(None, versions)) == set(VERSIONS)


def one_driver(node: Containerd, daemon: NriGpu, container: ContainerId) -> str:
    """The version of all that the container has of a driver; empty where it has nothing of any."""
    stage_dir, status = daemon.launch.base / "drivers", node.cri.status(container)
    staged = [Path(mount["source"]) for mount in status.oci["mounts"] if str(stage_dir) in mount["source"]]
    if not staged:
        return ""
    (generation,) = {source.relative_to(stage_dir).parts[0] for source in staged}
    version = generation.partition("-")[0]
    shown = node.cri.execute(container, "/bin/sh", "-c", PROBE)
    assert shown.stdout.splitlines() == [f"nvidia-smi: SIMULATION of driver {version}, no GPU behind it", version]
    assert f"gen={generation};" in status.oci["annotations"]["gpu.nri.io/grant"]
    return version


def test_the_old_drivers_files_stay_as_long_as_a_container_has_them(
    node: Containerd, daemon: NriGpu, drivers: Drivers
) -> None:
    container = created(node, pod(node))
    assert container
    drivers.install(VERSIONS[1])
    daemon.wait_logged(f"driver files staged generation={VERSIONS[1]}")
    shown = node.cri.execute(container, f"{LIBRARIES}/bin/nvidia-smi")
    assert f"SIMULATION of driver {VERSIONS[0]}" in shown.stdout
    node.cri.remove_all()
    daemon.wait_logged(f"old driver files removed generation={VERSIONS[0]}")
    staged = {path.name.partition("-")[0] for path in (daemon.launch.base / "drivers").glob("[0-9]*")}
    assert staged == {VERSIONS[1]}
