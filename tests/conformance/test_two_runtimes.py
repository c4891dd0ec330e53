"""Two containerds on one host, a daemon for each, and one stage folder: whose files a container has mounted stay."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES
from tests.support.marks import on_newest
from tests.support.pods import PodSpec

pytestmark = on_newest

VERSIONS = ("570.195.03", "580.95.05")


def install(base: Path, version: str) -> None:
    """In one step, as a driver container does it."""
    (base / "fresh").symlink_to(version)
    (base / "fresh").rename(base / "driver")


@pytest.fixture
def launch(node: Containerd, tmp_path: Path) -> Launch:
    for version in VERSIONS:
        make_driver_root(tmp_path / version, version)
    install(tmp_path, VERSIONS[0])
    driver, stage_dir = tmp_path / "driver", tmp_path / "drivers"
    launch = Launch(tmp_path / "d", node.nri_socket, driver_root=driver, stage_dir=stage_dir)
    return launch.with_policy("[inventory]\nrefresh_s = 1\n")  # and so the driver is looked at each second


@pytest.fixture
def other_node(runtime: packages.Runtime) -> Iterator[Containerd]:
    with Containerd(runtime) as running:
        yield running


def started(node: Containerd) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(name=secrets.token_hex(4), annotations={"gpu.nri.io": "1; mode=shared"}))
    return node.cri.run(pod)


def files(node: Containerd, container: ContainerId) -> list[str]:
    """What the container sees of the driver."""
    return node.cri.execute(container, "/bin/ls", "-R", LIBRARIES).stdout.split()


def test_a_container_keeps_its_driver_whatever_the_other_daemon_thinks(
    node: Containerd, other_node: Containerd, launch: Launch, daemon: NriGpu, tmp_path: Path
) -> None:
    container = started(node)
    mounted = files(node, container)
    assert len(mounted) > 20
    with NriGpu(replace(launch, base=tmp_path / "other", socket=other_node.nri_socket)) as other:
        other.wait_ready()
        taken = f"stage folder {launch.stage_dir} belongs to another nri-gpu (pid {daemon.pid})"
        assert taken in other.wait_logged("driver files not found")
        install(tmp_path, VERSIONS[1])
        daemon.wait_logged(f"driver files staged generation={VERSIONS[1]}")
        for owner_lives in (True, False):
            if not owner_lives:
                daemon.kill()
            other.hang_up()  # it looks at the node anew
            other.wait_logged("policy reloaded")
            with pytest.raises(CriError, match="this node cannot grant GPUs: stage folder"):
                started(other_node)
            assert files(node, container) == mounted
        daemon.start()  # the owner comes back to what is its
        daemon.wait_staged()
        started(node)
        assert files(node, container) == mounted
        other_node.cri.remove_all()
