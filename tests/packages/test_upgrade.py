"""Upgrade, removal and purge of the packaged program while a container holds a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nri_gpu import __version__
from tests.packages.conftest import AT, DAEMONS, NEWER, Debs
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.debian_root import DebianRoot
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES

TOPOLOGY: Final = Path("/usr/share/nri-gpu/topologies/four-gpus.toml")  # the package has it
UPGRADE_S: Final = 120.0


class Packaged(NriGpu):
    """The daemon as a package installed it."""

    def __init__(self, launch: Launch, root: DebianRoot) -> None:
        super().__init__(launch)
        self._root = root

    def words(self) -> list[str]:
        return self._root.command("nri-gpu")


def runs_from(daemon: NriGpu) -> str:
    return Path(f"/proc/{daemon.pid}/cmdline").read_text()


@pytest.fixture
def node() -> Iterator[Containerd]:
    with Containerd(packages.fetch(packages.Version.V2_1)) as running:
        yield running


def test_an_upgrade_beneath_a_container(node: Containerd, debs: Debs, with_package: Path) -> None:
    state = node.base / "nri-gpu"
    state.mkdir()
    # The runtime mounts what the daemon staged, so both have to see it under one name.
    seen = {node.base: str(node.base), state: "/var/lib/nri-gpu", debs.folder: AT}
    with DebianRoot("bookworm", seen, host_processes=True, over=with_package) as root:
        launch = Launch(
            node.base / "run",
            node.nri_socket,
            topology=TOPOLOGY,
            driver_root=make_driver_root(node.base / "driver"),
            stage_dir=state / "drivers",
        )
        with Packaged(launch, root) as daemon:
            daemon.wait_staged()
            train = node.cri.run_asking("device=1", "train")
            held = {"train/main": [UUIDS[1]]}
            daemon.wait_held(held)

            upgrade = subprocess.Popen(root.command("dpkg", "-i", *debs.newer), stdout=subprocess.DEVNULL)
            node.cri.run_asking("device=2", "meanwhile")
            assert upgrade.wait(UPGRADE_S) == 0
            held |= {"meanwhile/main": [UUIDS[2]]}
            daemon.wait_held(held)
            # Both trees: what runs is of the old one.
            assert len(root.run("ls", "/usr/lib/nri-gpu/live").split()) == 2
            assert f"/live/{__version__}-" in runs_from(daemon)
            daemon.restart()
            assert f"/live/{NEWER}-" in runs_from(daemon)
            daemon.wait_staged()
            daemon.wait_held(held)
            refused = node.cri.refused("device=1", "third")
            assert "[gpu-busy]" in str(refused)

            said = root.run("dpkg", "-r", *DAEMONS)
            assert "nri-gpu: it still runs; stop it. Its files in /usr/lib/nri-gpu/live stay until" in said
            assert root.run("ls", "/usr/lib/nri-gpu/live").startswith(f"{NEWER}-")
        said = root.run("dpkg", "-P", *DAEMONS)
        assert not [path for path in root.files() if path.startswith("/usr/lib/nri-gpu")]
        [generation] = [path for path in (state / "drivers").iterdir() if path.is_dir()]
        assert f"containers use the driver files in /var/lib/nri-gpu/drivers/{generation.name};" in said
        assert node.cri.execute(train, "/bin/ls", "/dev/nvidia1").code == 0
        assert "libcuda.so.1" in node.cri.execute(train, "/bin/ls", LIBRARIES).stdout
