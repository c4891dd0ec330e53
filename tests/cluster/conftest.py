"""One real Kubernetes a session, emptied after every test; without its programs every test here skips.

A second one, of two nodes, is there for the tests that ask for it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache import one_at_a_time
from tests.support.cluster import FOLDER, Cluster, programs
from tests.support.cluster_claims import DraCluster
from tests.support.daemon import FOUR_GPUS
from tests.support.nvidia_dra import NvidiaDra
from tests.support.observed_cluster import ObservedCluster, usual_bundles


@pytest.fixture(scope="session")
def bootable() -> None:
    if not os.environ.get(FOLDER):
        pytest.skip(f"set {FOLDER} to the folder of cluster.sh, which boots a Kubernetes")
    programs()
    if os.geteuid():
        pytest.fail("these tests boot a real Kubernetes and need root: run `make test-cluster` with sudo")


@pytest.fixture(scope="session")
def session_cluster(bootable: None) -> Iterator[Cluster]:
    # Its ports and its cgroup have fixed names: another run's cluster goes first.
    with one_at_a_time(Path("/tmp/nri-gpu-test-cluster.lock")), Cluster() as running:
        yield running


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """A running cluster without pods, and without anything of nri-gpu."""
    yield session_cluster
    session_cluster.clear()


@pytest.fixture(scope="module")
def two_nodes_running(bootable: None) -> Iterator[Cluster]:
    """Beside it: several nodes have ports and cgroups that are those of no other cluster."""
    with Cluster(2) as running:
        yield running


@pytest.fixture
def two_nodes(two_nodes_running: Cluster) -> Iterator[Cluster]:
    """A running cluster of two nodes without pods, and without anything of nri-gpu."""
    yield two_nodes_running
    two_nodes_running.clear()


@pytest.fixture(scope="module")
def three_nodes_running(bootable: None) -> Iterator[Cluster]:
    with Cluster(3) as running:
        yield running


@pytest.fixture
def three_nodes(three_nodes_running: Cluster) -> Iterator[Cluster]:
    """A running cluster of three nodes without pods and claims, and without anything of nri-gpu."""
    yield three_nodes_running
    DraCluster(three_nodes_running).end()
    three_nodes_running.clear()


@pytest.fixture(scope="session")
def image(session_cluster: Cluster) -> None:
    session_cluster.import_image()


@pytest.fixture
def dra(cluster: Cluster) -> Iterator[DraCluster]:
    """The cluster, whose GPUs claims ask for."""
    made = DraCluster(cluster)
    yield made
    made.end()


@pytest.fixture
def observed(cluster: Cluster) -> Iterator[ObservedCluster]:
    """The cluster, where NVIDIA's DRA driver and a device plugin allocate the four GPUs; no observer runs yet."""
    nvidia = NvidiaDra(cluster, FOUR_GPUS)
    nvidia.run()
    with usual_bundles(cluster):
        made = ObservedCluster(cluster)
        made.run_plugin()
        yield made
        cluster.kubectl("delete", "pods,resourceclaims", "--all")  # what prepared claims must run until they are gone
        made.end()
    nvidia.stop()
