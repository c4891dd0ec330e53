"""Real containerds for the tests: one of each generation a session, emptied after every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import packages
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root


@pytest.fixture(scope="session", params=packages.VERSIONS, ids=str)
def runtime(request: pytest.FixtureRequest) -> packages.Runtime:
    """Every containerd generation in turn."""
    if os.geteuid():
        pytest.fail("these tests boot a real containerd and need root: run them with sudo, or deselect containerd")
    version: packages.Version = request.param
    return packages.fetch(version)


@pytest.fixture(scope="session", params=Cgroup, ids=str)
def cgroup(request: pytest.FixtureRequest) -> Cgroup:
    """Every cgroup generation this machine can show to a containerd."""
    wanted: Cgroup = request.param
    if wanted is Cgroup.V1 and host_cgroup() is Cgroup.V2:
        pytest.skip("this machine has cgroup v2 only, and v1 cannot be had beside it")
    return wanted


@pytest.fixture(scope="session")
def session_node(runtime: packages.Runtime) -> Iterator[Containerd]:
    with Containerd(runtime) as running:
        yield running


@pytest.fixture(scope="session")
def session_cgroup_node(runtime: packages.Runtime, cgroup: Cgroup) -> Iterator[Containerd]:
    with Containerd(runtime, cgroup=cgroup) as running:
        yield running


@pytest.fixture
def node(session_node: Containerd) -> Iterator[Containerd]:
    """A running containerd on the machine's own cgroups, without pods. Shared: do not stop it."""
    yield session_node
    session_node.cri.remove_all()


@pytest.fixture
def cgroup_node(session_cgroup_node: Containerd) -> Iterator[Containerd]:
    """The same, once on each cgroup generation."""
    yield session_cgroup_node
    session_cgroup_node.cri.remove_all()


@pytest.fixture
def fresh_node(runtime: packages.Runtime) -> Iterator[Containerd]:
    """A running containerd of the test's own, to kill and restart."""
    with Containerd(runtime) as running:
        yield running


@pytest.fixture
def launch(node: Containerd, tmp_path: Path) -> Launch:
    """How to start nri-gpu on the shared node: four simulated GPUs, a made-up driver."""
    return Launch(tmp_path / "d", node.nri_socket, driver_root=make_driver_root(tmp_path / "driver"))


@pytest.fixture
def daemon(launch: Launch) -> Iterator[NriGpu]:
    """nri-gpu, serving the shared node, with the driver's files staged."""
    with NriGpu(launch) as running:
        running.wait_ready()
        running.wait_logged("driver files staged")
        yield running
