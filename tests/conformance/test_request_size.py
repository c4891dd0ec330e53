"""Containers that the runtime could not list to plugins: what would keep nri-gpu away from the node is not created."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.ttrpc import SEND_MAX
from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

REFUSED: Final = r"\[(request-too-large|list-too-large)\]"
READY_S: Final = 10.0  # a Synchronize of many MiB on a busy machine; before, it never came
CONNECTS_S: Final = 30.0  # after what was in the way is gone
ORDINARY: Final = 12
GUARD_MAX_MIB: Final = 256  # MemoryMax= of its unit


@pytest.fixture
def fresh_node(runtime: packages.Runtime) -> Iterator[Containerd]:
    """Taken away as it is: to look at each of its containers first would take as long as the test."""
    node = Containerd(runtime)
    try:
        node.boot()
        yield node
    finally:
        node.abandon()


@pytest.fixture
def served(fresh_node: Containerd, tmp_path: Path) -> Iterator[tuple[Containerd, NriGpu, NriGuard]]:
    """A containerd of the test's own, with daemon and guard."""
    launch = launch_on(fresh_node, tmp_path)
    with NriGpu(replace(launch, log_level="INFO")) as daemon, NriGuard(launch) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        yield fresh_node, daemon, guard


def environment(size_bytes: int) -> dict[str, str]:
    """As many ConfigMaps by `envFrom` make it."""
    return {f"FILLER_{at}": "x" * min(10_000, size_bytes - at) for at in range(0, size_bytes, 10_000)}


def fill(node: Containerd, pods: list[Pod], count: int, size_bytes: int, first: int = 0) -> int:
    """Create so many containers of that size in these pods in turn, and start the first; how many were refused.

    first: its number. Each has the labels that a kubelet gives it.
    """

    def one(number: int) -> bool:
        pod = pods[number % len(pods)]
        spec = ContainerSpec(name=f"c{number}", env=environment(size_bytes), labels=labels(pod))
        try:
            container = node.cri.create(pod, spec)
            if number < ORDINARY:
                node.cri.start(container)
        except CriError as error:
            assert re.search(REFUSED, error.details), error
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(one, range(first, first + count)))


def labels(pod: Pod) -> dict[str, str]:
    of = pod.config.metadata
    return {"io.kubernetes.pod.name": of.name, "io.kubernetes.pod.namespace": of.namespace}


def run_pods(node: Containerd, prefix: str, count: int) -> list[Pod]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: node.cri.run_pod(PodSpec(name=f"{prefix}{number}")), range(count)))


def restart(daemon: NriGpu, guard: NriGuard) -> None:
    """Kill both, and wait until they serve again."""
    for process in (daemon, guard):
        process.kill()
        process.start()
    for process in (daemon, guard):
        process.wait_ready(READY_S)


def comes_back(node: Containerd, daemon: NriGpu, guard: NriGuard) -> None:
    """Daemon and guard, killed and started, serve again, and a container that asks gets its GPU."""
    restart(daemon, guard)
    daemon.wait_logged("driver files staged")
    assert peak_mib(guard) < GUARD_MAX_MIB
    container = node.cri.run_asking("device=0", "victim")
    assert "nvidia0" in node.cri.execute(container, "ls", "/dev").stdout


def peak_mib(process: NriGpu) -> int:
    """The most memory that it ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found
    return int(found[1]) >> 10


@pytest.mark.short
def test_large_containers_beside_ordinary_pods(served: tuple[Containerd, NriGpu, NriGuard]) -> None:
    node, daemon, guard = served
    assert fill(node, run_pods(node, "ordinary", ORDINARY), ORDINARY, 2_000) == 0
    assert fill(node, run_pods(node, "large", 1), 30, 1_900_000) == 30
    comes_back(node, daemon, guard)


def test_many_pods_with_the_variables_of_many_services(served: tuple[Containerd, NriGpu, NriGuard]) -> None:
    """No attacker: as many as the older runtime can list, more than one message of the newer, and all are let in."""
    node, daemon, guard = served
    count = 200 if node.runtime.number < (2, 0) else 120  # one message just too small for more; or several
    pods = run_pods(node, "p", count // 10)  # a pause container each is what takes the time
    assert fill(node, pods, count, 70_000) == 0
    comes_back(node, daemon, guard)


def remove(node: Containerd, pod: Pod) -> None:
    """Remove a pod as a kubelet does, its containers first.

    Whoever has a containerd from 1.7.26 on remove a pod with containers while a plugin registers never gets an answer:
    RemovePodSandbox takes the lock that it holds once more for each of them (seen on 2.1.9 and 2.4.2).
    """
    there = [ContainerId(each.id) for each in node.cri.containers() if each.pod_sandbox_id == pod.id]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(node.cri.stop, there))
        node.cri.stop_pod(pod.id)
        list(pool.map(node.cri.remove, there))
    node.cri.remove_pod(pod.id)


MANY: Final = {"90 of 60 kB": (90, 60_000), "400 of 20 kB": (400, 20_000), "2,000 of 4 kB": (2_000, 4_000)}
OFTEN: Final = (("90 of 60 kB", 1), ("400 of 20 kB", 60))  # the rest costs a minute or more for little


@pytest.mark.parametrize(
    ("count", "size_bytes", "pods"),
    [
        pytest.param(*sizes, pods, id=f"{name}-{pods} pods", marks=() if (name, pods) in OFTEN else pytest.mark.long)
        for name, sizes in MANY.items()
        for pods in (1, 60)
    ],
)
def test_many_small_containers(
    served: tuple[Containerd, NriGpu, NriGuard], count: int, size_bytes: int, pods: int
) -> None:
    """A pod pays for what it comes to, and no other; daemon and guard are killed in the middle, and come back."""
    node, daemon, guard = served
    hostile = run_pods(node, "hostile", pods)
    refused = fill(node, hostile, count // 2, size_bytes)
    restart(daemon, guard)
    refused += fill(node, hostile, count // 2, size_bytes, count // 2)
    if pods > 1 or node.runtime.number < (2, 0):
        assert refused == 0
    else:
        assert refused >= count - (4 << 20) // size_bytes
    comes_back(node, daemon, guard)
    assert fill(node, run_pods(node, "neighbour", 1), 6, 4_000) == 0  # below its share


def test_once_the_named_pods_are_gone_nri_gpu_connects(fresh_node: Containerd, tmp_path: Path) -> None:
    """What was created while both were away is not measured."""
    old = fresh_node.runtime.number < (2, 0)  # it sends nothing of a list over 16 MiB, so there is nothing to name
    many = run_pods(fresh_node, "many", 1)
    assert fill(fresh_node, many, 300 if old else 90, 60_000) == 0
    launch = launch_on(fresh_node, tmp_path)
    with NriGpu(launch) as daemon, NriGuard(launch) as guard:
        said = daemon.wait_logged("no connection survives Synchronize")
        assert old or "default/many0 (" in said
        remove(fresh_node, many[0])
        gone = time.monotonic()
        for process in (daemon, guard):
            process.wait_ready(gone + CONNECTS_S - time.monotonic())
        daemon.wait_logged("driver files staged")
        container = fresh_node.cri.run_asking("device=0", "victim")
        assert "nvidia0" in fresh_node.cri.execute(container, "ls", "/dev").stdout


@pytest.mark.containerd(packages.Version.V1_7)  # newer ones cannot send a request of that size
def test_who_is_refused_for_the_size_of_its_answer_holds_nothing(node: Containerd, launch: Launch) -> None:
    with staged(launch.with_policy("[plugin]\nrequest_bytes = 0\n")) as daemon:
        long = ContainerSpec(env={"LD_LIBRARY_PATH": "/".ljust(SEND_MAX, "x")})
        with pytest.raises(CriError, match=re.escape("[request-too-large]: the answer to the runtime")):
            node.cri.create(node.cri.asking("4", "long"), long)
        node.cri.run_asking("4", "victim")
        daemon.wait_held({"victim/main": UUIDS})
