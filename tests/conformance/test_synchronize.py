"""A node so full that it takes more than one message to tell: the ledger comes back whole all the same."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Cri
from tests.support.daemon import NriGpu
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

MESSAGE_MAX = 4 << 20  # bytes: what one ttrpc message may hold
# As many pods as containers, and many of both: where a runtime's count for one part rounds down to none of a kind, it
# sends empty parts until its time is over (containerd/nri pkg/adaptation/plugin.go; seen with one pod on 2.1.9).
PODS = 24
FILLER = {f"filler.example/{n}": "x" * 25_000 for n in range(10)}  # 250 kB a pod, 6 MB in all
GPUS = 4
GRACE_S = 18  # longer than the time after which a daemon says that it waits
DEAF = ("sh", "-c", "trap 'touch /tmp/told' TERM; while :; do sleep 1; done")


def fill(node: Containerd, number: int) -> str:
    """A pod with a container; two of three hold a GPU, of which one is created and never started. Its name."""
    asks = {"gpu.nri.io": f"device={number % GPUS}; mode=shared"} if number % 3 else {}
    pod = node.cri.run_pod(PodSpec(name=f"p{number}", annotations=FILLER | asks))
    container = node.cri.create(pod, ContainerSpec())
    if number % 3 != 2:
        node.cri.start(container)
    return f"p{number}/main"


@pytest.mark.short
def test_a_node_that_takes_more_than_one_message(node: Containerd, daemon: NriGpu) -> None:
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda number: fill(node, number), range(PODS)))
    uuids = [gpu["uuid"] for gpu in daemon.gpus()["gpus"]]
    held = {name: [uuids[number % GPUS]] for number, name in enumerate(names) if number % 3}
    daemon.wait_held(held)
    before = daemon.ledger()

    daemon.kill()
    daemon.launch.log.unlink()
    (daemon.launch.state / "ledger.json").unlink()  # what is there afterwards came from the runtime
    daemon.start()
    daemon.wait_ready()

    parts, size_bytes = synchronized(daemon)
    assert size_bytes > MESSAGE_MAX
    assert parts == 1 if node.runtime.number < (2, 0) else parts > 1
    daemon.wait_held(held)
    assert by_id(daemon.ledger()) == by_id(before)
    assert {grant["phase"] for grant in before["grants"]} == {"created", "running"}
    assert "[gpu-busy]" in node.cri.refused("1", "late").details


@pytest.mark.containerd(packages.Version.V2_1, packages.Version.V2_4)  # 1.7.24 lets a plugin in meanwhile
def test_a_daemon_that_comes_back_while_a_container_is_stopped_for_long_misses_nothing(
    node: Containerd, daemon: NriGpu
) -> None:
    """The runtime keeps it waiting, and all creations with it (containerd#14083): it hangs up on nobody."""

    def stop() -> None:
        with Cri(node.cri_socket) as another:
            another.stop(held, GRACE_S)

    def create(number: int) -> ContainerId:
        with Cri(node.cri_socket, cgroup_parent=f"/{node.base.name}") as another:
            return another.run_asking("1", f"late{number}")

    held = node.cri.run_asking("1", "slow", command=DEAF)
    with ThreadPoolExecutor(GPUS) as pool:
        stopping = pool.submit(stop)
        wait_for("its SIGTERM", lambda: node.cri.execute(held, "/bin/ls", "/tmp/told").code == 0, GRACE_S)
        daemon.terminate()
        daemon.start()
        daemon.wait_logged("registered")
        late = list(pool.map(create, range(GPUS - 1)))
        stopping.result()
    assert all(len(node.cri.status(each).device_paths) for each in late)
    assert "runtime does not list its containers yet" in daemon.log()
    assert "connection ended" not in daemon.log()


def synchronized(daemon: NriGpu) -> tuple[int, int]:
    """How many parts Synchronize came in, and their bytes together."""
    found = re.search(r"parts=(\d+) payload_bytes=(\d+)", daemon.wait_logged("synchronized"))
    assert found
    return int(found[1]), int(found[2])


def by_id(ledger: object) -> dict[str, object]:
    assert isinstance(ledger, dict)
    return {grant["container_id"]: grant | {"since_s": None} for grant in ledger["grants"]}
