"""Containers that containerd no longer knows or lists while their processes live, and the kubelet's next attempt."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from msgspec import Struct

from tests.cluster.test_dra import ONE_GPU, WAITS
from tests.support import packages
from tests.support.cgroup import end_processes, processes
from tests.support.cluster import GPU, READY_S, Cluster, Object, pod, wait_for
from tests.support.cluster_claims import DraCluster, claiming

pytestmark = pytest.mark.cluster

ONE_FOR_EACH_POD = "[limits]\ngpus_per_pod = 1\n"
# The kubelet takes no notice when a container becomes unknown: it looks at a pod every 60 to 90 s, and when its labels
# change. Then it ends the container before its next attempt, and frozen processes wait for SIGKILL.
STOP_S = 10
CLOSED_S = 90  # enough for the kubelet or the scheduler to know that a GPU is lost for a minute
TRAPS = ["sh", "-c", "trap exit TERM; sleep 3600 & wait"]
LOST = "ended, but its processes live on"


class AllocationWay(Struct, frozen=True):
    """A way to ask for a GPU.

    waits: what is said of a pod that asks while another has the only one. closed: whether no pod is sent to that GPU.
    """

    runs: Callable[[Cluster, DraCluster], None]
    asks: Callable[[str], tuple[Object, ...]]
    waits: str
    closed: Callable[[Cluster, DraCluster], bool] | None = None


def run_annotations(cluster: Cluster, _: DraCluster) -> None:
    cluster.run_daemon(ONE_GPU, ONE_FOR_EACH_POD, "--no-kubelet")


def run_device_plugin(cluster: Cluster, _: DraCluster) -> None:
    cluster.run_daemon(ONE_GPU, ONE_FOR_EACH_POD)
    cluster.wait_allocatable(1)


def run_claims(_: Cluster, dra: DraCluster) -> None:
    dra.run(ONE_GPU, ONE_FOR_EACH_POD)


def not_allocatable(cluster: Cluster, _: DraCluster) -> bool:
    return cluster.allocatable() == 0


def tainted(_: Cluster, dra: DraCluster) -> bool:
    return dra.taints("gpu-0") == {"gpu.nri.io/held": "NoSchedule"}


WAYS = {
    "annotation": AllocationWay(
        run_annotations, lambda name: (pod(name, annotations={"gpu.nri.io": "1"}),), "gpu-busy"
    ),
    "device-plugin": AllocationWay(
        run_device_plugin, lambda name: (pod(name, 1),), f"Insufficient {GPU}", not_allocatable
    ),
    "claim": AllocationWay(run_claims, claiming, WAITS, tainted),
}


def by_each_way(short: str = "") -> pytest.MarkDecorator:
    """A run for each. short: the one that is in the short list, too."""
    ways = [pytest.param(way, id=name, marks=[pytest.mark.short] * (name == short)) for name, way in WAYS.items()]
    return pytest.mark.parametrize("way", ways)


@pytest.fixture
def without_cleanup(cluster: Cluster) -> Iterator[None]:
    """A containerd that leaves the processes of a killed shim alone; 2.4 ends them."""
    older = {"CONTAINERD_BIN": str(packages.fetch(packages.Version.V2_3).folder)}
    cluster.stop("containerd")
    cluster.start("containerd", older)
    yield
    cluster.stop("containerd")
    cluster.start("containerd")


class First:
    """The first attempt at the container of pod `train`, which has the node's only GPU."""

    def __init__(self, cluster: Cluster, dra: DraCluster, way: AllocationWay) -> None:
        way.runs(cluster, dra)
        *others, train = way.asks("train")
        train["spec"]["terminationGracePeriodSeconds"] = CLOSED_S if way.closed else STOP_S
        train["spec"]["containers"][0]["command"] = TRAPS
        cluster.apply(*others, train)
        cluster.wait_phase("train")
        assert cluster.minors("train") == {0}
        self._cluster = cluster
        self.id = cluster.container_id("train")
        (first,) = cluster.pids("train")
        self.shim = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        self._cgroup, self._freezer = (cluster.cgroup(first, controller) for controller in ("devices", "freezer"))
        self.pids = frozenset(processes(self._cgroup))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def pause(self) -> None:
        self._cluster.verb("ctr", "task", "pause", self.id)

    def kill_shim(self) -> None:
        """Until the kubelet's next attempt runs, with the same GPU."""
        os.kill(self.shim, signal.SIGKILL)
        self._cluster.wait_phase("train", restarts=1)
        assert self._cluster.minors("train") == {0}

    def wait_lost(self) -> None:
        """`status` shows it as lost, with the processes that hold its GPU."""
        wait_for("it to be lost", lambda: bool(status(self._cluster)["lost"]))
        (lost,) = status(self._cluster)["lost"]
        assert (lost["pod"], lost["container_id"]) == ("default/train", self.id)
        assert set(lost["pids"]) == self.pids

    def end(self) -> None:
        end_processes(self._cgroup, self._freezer)
        wait_for("its processes to end", lambda: not processes(self._cgroup))


def status(cluster: Cluster) -> Object:
    found: Object = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)
    return found


def holders(cluster: Cluster) -> dict[str, str]:
    """Of the only GPU: container's id -> phase."""
    (gpu,) = status(cluster)["gpus"]
    return {each["container_id"]: each["phase"] for each in gpu["holders"]}


def wait_alone(cluster: Cluster) -> None:
    """Until the running attempt is the GPU's only holder, and nobody is lost."""
    wanted = {cluster.container_id("train"): "running"}
    wait_for("one holder", lambda: holders(cluster) == wanted, READY_S, lambda: cluster.nri_gpu("status").stdout)
    assert status(cluster)["lost"] == []


@by_each_way()
def test_the_kubelet_restarts_an_unknown_container(cluster: Cluster, dra: DraCluster, way: AllocationWay) -> None:
    """Paused while containerd is killed. The kubelet ends it first, so that it never runs beside its next attempt."""
    with First(cluster, dra, way) as first:
        first.pause()
        cluster.kill("containerd")
        cluster.start("containerd")
        first.wait_lost()
        cluster.apply(*way.asks("other"))
        cluster.wait_said("other", way.waits)
        cluster.kubectl("label", "pod", "train", "look=now")
        cluster.wait_said("train", 'Container is in "unknown" state')
        if way.closed:
            closed = partial(way.closed, cluster, dra)
            wait_for("no pod to be sent to its GPU", closed, CLOSED_S)
        assert holders(cluster) == {first.id: "lost"}

        cluster.wait_phase("train", restarts=1)
        assert cluster.minors("train") == {0}
        wait_alone(cluster)
        if way.closed:
            wait_for("its GPU to be open again", lambda: not closed())
        assert cluster.get("pod", "other")["status"]["phase"] == "Pending"


@pytest.mark.usefixtures("without_cleanup")
@by_each_way(short="device-plugin")
def test_the_next_attempt_has_the_gpu_beside_the_last(cluster: Cluster, dra: DraCluster, way: AllocationWay) -> None:
    with First(cluster, dra, way) as first:
        first.pause()
        first.kill_shim()
        first.wait_lost()
        assert holders(cluster) == {first.id: "lost", cluster.container_id("train"): "running"}
        cluster.apply(*way.asks("other"))
        cluster.wait_said("other", way.waits)
        first.end()
        wait_alone(cluster)
        assert cluster.get("pod", "other")["status"]["phase"] == "Pending"


@pytest.mark.usefixtures("without_cleanup")
@by_each_way()
def test_other_pods_wait_for_it_when_its_own_is_over(cluster: Cluster, dra: DraCluster, way: AllocationWay) -> None:
    """The kubelet takes the GPU for free then, and the scheduler does if it is faster than our taint."""
    with First(cluster, dra, way) as first:
        first.pause()
        first.kill_shim()
        cluster.kubectl("delete", "pod", "train", "--wait=false")
        cluster.apply(*way.asks("other"))

        def kept() -> bool:
            return LOST in cluster.said_of("other") or bool(way.closed and way.closed(cluster, dra))

        wait_for("the other pod to be told to wait", kept, READY_S, lambda: cluster.said_of("other"))
        first.wait_lost()
        assert "running" not in holders(cluster).values()
        first.end()
    cluster.kubectl("delete", "pod", "other")  # the kubelet waits long before it tries again
    cluster.apply(*way.asks("after"))
    cluster.wait_phase("after")
    assert cluster.minors("after") == {0}
