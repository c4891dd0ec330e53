"""A GPU turns bad under a real containerd: the next containers go elsewhere, and it comes back."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.health import EventType
from tests.support._pb import cri_tests_pb2 as pb
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, happen
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

SLEEP = ContainerSpec(command=("/bin/sleep", "600"))
UUIDS = tuple(f"GPU-{n}b200000-0000-4000-8000-00000000000{n}" for n in range(4))
CHANGED = "gpu health changed"
BAD = "XID 79, GPU has fallen off the bus"


def policy(base: Path, node: Containerd, **health: object) -> Path:
    path = base / "policy.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in health.items()]
    guard = f'[guard]\ncri_socket = "{node.cri_socket}"\nstop_grace_s = 0\n'
    path.write_text("\n".join(["schema = 1", "[health]", *lines, guard]))
    return path


@contextmanager
def simulated(node: Containerd, base: Path, events: str = "", **health: object) -> Iterator[NriGpu]:
    topology = base / "node.toml"
    topology.write_text(FOUR_GPUS.read_text() + events)
    launch = Launch(base / "d", node.nri_socket, topology=topology, policy=policy(base, node, **health))
    with NriGpu(launch) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("driver files")  # found or not: before, it refuses
        yield daemon


def said(daemon: NriGpu, *words: str) -> str:
    """What a verb prints, whatever it returns."""
    command = [sys.executable, "-m", "nri_gpu", *words, "--state-dir", str(daemon.launch.state)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/").stdout


def states(daemon: NriGpu) -> Sequence[str]:
    return [gpu["health"]["state"] for gpu in json.loads(said(daemon, "status", "-o", "json"))["gpus"]]


def running(node: Containerd, container: ContainerId) -> bool:
    return any(each.id == container and each.state == pb.CONTAINER_RUNNING for each in node.cri.containers())


def held(daemon: NriGpu) -> set[str]:
    return {uuid for uuids in daemon.held().values() for uuid in uuids}


@on_newest
def test_bad_is_avoided_said_and_granted_again(node: Containerd, tmp_path: Path) -> None:
    """GPU 1 falls off the bus; all the others go on."""
    event = "\n[[event]]\nat_s = 0\ngpu = 1\nxid = 79\n"
    with simulated(node, tmp_path, event, hold_down_s=3600, reprobe_s=1) as daemon:
        daemon.wait_logged(CHANGED)
        with pytest.raises(CriError) as refused:
            node.cri.run_asking("device=1", "unlucky")
        assert "since 20" in refused.value.details
        assert BAD in refused.value.details
        for name in "abc":
            node.cri.run_asking("count=1", name)
        uuids = [gpu["uuid"] for gpu in daemon.gpus()["gpus"]]
        daemon.wait_grants(3)
        assert held(daemon) == {*uuids} - {uuids[1]}
        assert states(daemon)[0::2] == ["healthy", "healthy"]
        assert BAD in said(daemon, "status")
        assert BAD in said(daemon, "gpus", "--gpus", str(daemon.launch.topology))
        policy(tmp_path, node, hold_down_s=1, reprobe_s=1)
        daemon.hang_up()
        wait_for("GPU 1 to recover", lambda: states(daemon)[1] == "healthy", 30)
        assert f"recovered from: {BAD}; its state changed 3 times" in said(daemon, "status")
        node.cri.run_asking("device=1", "lucky")
        daemon.wait_grants(4)
        changes = [line.partition(" state=")[2].split()[0] for line in daemon.log().splitlines() if CHANGED in line]
        assert changes == ["bad", "recovering", "healthy"]


def test_a_container_on_a_bad_gpu_is_stopped_where_policy_says_so(node: Containerd, tmp_path: Path) -> None:
    """Its pod's next attempt gets another GPU, in place."""
    with simulated(node, tmp_path, containers="stop") as daemon:
        stays = node.cri.run_asking("device=1", "stays")
        pod = node.cri.asking("count=1", "moves")
        first = node.cri.run(pod, SLEEP)
        daemon.wait_grants(2)
        topology = daemon.launch.topology
        assert topology
        topology.write_text(topology.read_text().replace("[[gpu]]\n", '[[gpu]]\nsigns = "remap-failed"\n', 1))
        daemon.hang_up()
        daemon.wait_logged("container stopped: its GPU is bad: a row of its memory could not be remapped")
        wait_for("its stop", lambda: not running(node, first), 20)
        assert running(node, stays)
        node.cri.remove(first)
        node.cri.run(pod, SLEEP)
        daemon.wait_grants(2)
        bad, other, *_ = (gpu["uuid"] for gpu in daemon.gpus()["gpus"])
        assert bad not in held(daemon)
        assert other in held(daemon)


STOPPED = "container stopped: its GPU is bad: "
LOST = "nvmlDeviceGetHandleByIndex: GPU is lost (15)"


def edited(daemon: NriGpu, text: str) -> None:
    """The node is this from now on."""
    assert daemon.launch.topology
    daemon.launch.topology.write_text(text)
    daemon.hang_up()


def without_first(text: str, fault: str = "") -> str:
    """The node when its first GPU is not listed any more; its fault instead, where there is one."""
    blocks = re.split(r"(?m)^(?=\[\[)", text)
    kept = (each for each in blocks if not re.match(r"\[\[(gpu\]\]\nindex|link\]\]\na) = 0\b", each))
    return "".join(kept) + fault


def moves(node: Containerd, daemon: NriGpu, request: str, end: Callable[[], str]) -> tuple[set[str], set[str]]:
    """A container is stopped, and its pod's next one is granted something else, in place.

    end: does it to what it holds, and returns why it was stopped. Returns what was held before and after.
    """
    pod = node.cri.asking(request, "moves")
    first = node.cri.run(pod, SLEEP)
    daemon.wait_grants(1)
    before = held(daemon)
    why = end()
    daemon.wait_logged(STOPPED + why)
    wait_for("its stop", lambda: not running(node, first), 20)
    node.cri.remove(first)
    second = node.cri.run(pod, SLEEP)
    wait_for("another grant", lambda: bool(held(daemon)) and held(daemon) != before, 20)
    assert running(node, second)
    return before, held(daemon)


@pytest.mark.parametrize("how", ["xid", "lost", "nameless"])
@on_newest
def test_its_pods_next_container_gets_another_gpu(node: Containerd, tmp_path: Path, how: str) -> None:
    """After a fatal XID, where its GPU cannot be described any more, and where it is not even listed."""
    text = FOUR_GPUS.read_text()
    event = "\n[[event]]\nat_s = 0\ngpu = 0\nxid = 79\n"
    fault = f'\n[[fault]]\nindex = 0\nreason = "{LOST}"\ncode = 15\nsign = "lost"\n'
    after, why = {
        "xid": (text + event, BAD),
        "lost": (without_first(text, fault), LOST),
        "nameless": (without_first(text), "GPU is lost: NVML does not list it any more"),
    }[how]
    with simulated(node, tmp_path, containers="stop") as daemon:
        first, second, *_ = (gpu["uuid"] for gpu in daemon.gpus()["gpus"])

        def end() -> str:
            edited(daemon, after)
            return why

        assert moves(node, daemon, "count=1", end) == ({first}, {second})
        assert why in said(daemon, "status")


@on_newest
def test_with_a_mig_device_of_a_gpu_that_is_lost(node: Containerd, tmp_path: Path) -> None:
    topology, text = tmp_path / "node.toml", (TOPOLOGIES / "mig-a100.toml").read_text()
    topology.write_text(text)
    rules = policy(tmp_path, node, containers="stop")
    with NriGpu(Launch(tmp_path / "d", node.nri_socket, topology=topology, policy=rules)) as daemon:
        daemon.wait_ready()
        gpus = {part["uuid"]: gpu["index"] for gpu in daemon.gpus()["gpus"] for part in gpu["mig"]}

        def end() -> str:
            (lost,) = {gpus[uuid] for uuid in held(daemon)}
            edited(daemon, text.replace(f"index = {lost}\nminor", f'index = {lost}\nsigns = "lost"\nminor'))
            return "GPU is lost"

        (before,), (after,) = moves(node, daemon, "mig=1g.10gb", end)
        assert gpus[before] != gpus[after]


@pytest.mark.parametrize("fault", ["", f'\n[[fault]]\nindex = 0\nreason = "{LOST}"\nsign = "lost"\n'])
@on_newest
def test_a_gpu_that_was_lost_while_nobody_ran(node: Containerd, tmp_path: Path, fault: str) -> None:
    """The runtime tells who holds it, after the first look; at first policy says to report."""
    with simulated(node, tmp_path) as daemon:
        uuid = daemon.gpus()["gpus"][0]["uuid"]
        container, stays = node.cri.run_asking("device=0", "unlucky"), node.cri.run_asking("device=1", "stays")
        daemon.wait_grants(2)
        daemon.kill()
        assert daemon.launch.topology
        daemon.launch.topology.write_text(without_first(FOUR_GPUS.read_text(), fault))
        daemon.start()
        daemon.wait_ready()
        assert uuid in daemon.wait_logged("container is on a bad gpu")
        assert "GPU is lost" in said(daemon, "status")
        assert running(node, container)
        policy(tmp_path, node, containers="stop")
        daemon.hang_up()
        daemon.wait_logged(STOPPED)
        wait_for("its stop", lambda: not running(node, container), 20)
        assert running(node, stays)


@on_newest
def test_nvml_tells_of_a_held_gpu_while_creates_go_on(node: Containerd, tmp_path: Path) -> None:
    """The driver's own way: events of the GPUs that are listened to, through the unmodified binding."""
    root = build_fake_nvml(make_driver_root(tmp_path / "driver"), [FakeGpu(uuid=uuid) for uuid in UUIDS])
    rules = policy(tmp_path, node, events="all", hold_down_s=3, reprobe_s=1)
    with NriGpu(Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root, policy=rules)) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("listening for errors of gpus gpus=4")
        happen(root, 1, EventType.XID, 79)
        line = daemon.wait_logged(CHANGED)
        assert UUIDS[1] in line
        assert BAD in line
        node.cri.run(node.cri.run_pod(), SLEEP)
        assert states(daemon)[0] == states(daemon)[2] == "healthy"
        wait_for("GPU 1 to recover", lambda: states(daemon)[1] == "healthy", 30)


@on_newest
def test_an_event_process_that_has_lost_its_mind_costs_nobody_anything(node: Containerd, tmp_path: Path) -> None:
    """The driver's library writes into it what it likes: it is ended, and the daemon is not."""
    mad = [Act("nvmlEventSetWait_v2", "babble")]
    gpus = [FakeGpu(uuid=uuid) for uuid in UUIDS]
    root = build_fake_nvml(make_driver_root(tmp_path / "driver"), gpus, mad)
    rules = policy(tmp_path, node, events="all")
    with NriGpu(Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root, policy=rules)) as daemon:
        daemon.wait_ready()
        pid = daemon.pid
        daemon.wait_logged("sent a malformed line after nvmlEventSetWait_v2")
        node.cri.run(node.cri.run_pod(), SLEEP)
        configure(root, gpus)
        daemon.wait_logged("listening for errors of gpus again")
        happen(root, 1, EventType.XID, 79)
        assert BAD in daemon.wait_logged(CHANGED)
        assert daemon.pid == pid
        assert states(daemon)[0] == "healthy"
