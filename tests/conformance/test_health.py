"""A GPU turns bad under a real containerd: the next containers go elsewhere, and it comes back."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.health import EventType
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.daemon import UUIDS as SIMULATED
from tests.support.driver_root import make_driver_root
from tests.support.kubelet import Kubelet
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, FakeHealth, build_fake_nvml, configure, happen
from tests.support.waiting import aside, in_a_loop, wait_for

pytestmark = pytest.mark.containerd

UUIDS = tuple(f"GPU-{n}b200000-0000-4000-8000-00000000000{n}" for n in range(4))
GPU = "nvidia.com/gpu"
CHANGED = "GPU health changed"
BAD = "XID 79, GPU has fallen off the bus"
STOPPED = 'container stopped reason="its GPU is bad: '
LOST = "nvmlDeviceGetHandleByIndex: GPU is lost (15)"


def policy(node: Containerd, **health: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in health.items()]
    return "\n".join(["[health]", *lines, f'[guard]\ncri_socket = "{node.cri_socket}"\nstop_grace_s = 0\n'])


@contextmanager
def simulated(node: Containerd, base: Path, events: str = "", **health: object) -> Iterator[NriGpu]:
    topology = base / "node.toml"
    topology.write_text(FOUR_GPUS.read_text() + events)
    with NriGpu(Launch(base / "d", node.nri_socket, topology=topology).with_policy(policy(node, **health))) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("driver files")  # found or not: before, it refuses
        yield daemon


def states(daemon: NriGpu) -> Sequence[str]:
    return [gpu["health"]["state"] for gpu in daemon.status()["gpus"]]


def wait_stopped(node: Containerd, container: ContainerId) -> None:
    wait_for("its stop", lambda: node.cri.status(container).state == "EXITED", 20)


def held(daemon: NriGpu) -> set[str]:
    return {uuid for uuids in daemon.held().values() for uuid in uuids}


@on_newest
def test_bad_is_avoided_said_and_granted_again(node: Containerd, tmp_path: Path) -> None:
    """GPU 1 falls off the bus; all the others go on."""
    event = "\n[[event]]\nat_s = 0\ngpu = 1\nxid = 79\n"
    with simulated(node, tmp_path, event, hold_down_s=3600, reprobe_s=1, reset="quiet") as daemon:
        daemon.wait_logged(CHANGED)
        refusal = node.cri.refused("device=1", "unlucky").details
        assert "since 20" in refusal
        assert BAD in refusal
        for name in "abc":
            node.cri.run_asking("count=1", name)
        daemon.wait_grants(3)
        assert held(daemon) == {*SIMULATED} - {SIMULATED[1]}
        assert states(daemon)[0::2] == ["healthy", "healthy"]
        assert BAD in daemon.verb("status").stdout
        assert BAD in daemon.verb("gpus", "--gpus", str(daemon.launch.topology)).stdout
        daemon.launch.with_policy(policy(node, hold_down_s=1, reprobe_s=1, reset="quiet"))
        daemon.hang_up()
        wait_for("GPU 1 to recover", lambda: states(daemon)[1] == "healthy", 30)
        assert f"recovered from: {BAD}; its state changed 3 times" in daemon.verb("status").stdout
        node.cri.run_asking("device=1", "lucky")
        daemon.wait_grants(4)
        changes = [line.partition(" state=")[2].split()[0] for line in daemon.log().splitlines() if CHANGED in line]
        assert changes == ["bad", "recovering", "healthy"]


def xid_at(*events: tuple[float, int, int]) -> str:
    """events: seconds, GPU and number."""
    return "".join(f"\n[[event]]\nat_s = {at_s}\ngpu = {gpu}\nxid = {xid}\n" for at_s, gpu, xid in events)


# Crashes of programs, half a minute apart as reprobe_s goes; and one error that asks for a reset.
CRASHES = xid_at((1, 0, 69), (4, 0, 69), (1, 1, 145), (4, 1, 145), (1, 2, 137), (4, 2, 137), (1, 3, 46))


@on_newest
@in_a_loop
async def test_only_what_asks_for_a_reset_takes_a_gpu_from_the_node(
    node: Containerd, tmp_path: Path, folder: Path
) -> None:
    """As the kubelet counts them, too; and only root's word brings that one back, which the audit log has."""
    kubelet = f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\ncdi_dir = "{node.layout.cdi}"\n'
    topology = tmp_path / "node.toml"
    topology.write_text(NODE + CRASHES)
    launch = Launch(tmp_path / "d", node.nri_socket, topology=topology)
    with NriGpu(launch.with_policy(policy(node, reprobe_s=1, hold_down_s=5) + kubelet)) as daemon:
        async with Kubelet(folder) as served:
            await aside(daemon.wait_ready)
            await aside(daemon.wait_logged, "driver files")
            await aside(wait_for, "all events", lambda: "XID 145" in daemon.status()["gpus"][1]["notes"]["xid"], 20)
            await asyncio.sleep(9)  # longer than the hold-down, and all events have come
            await served.wait_healthy(GPU, 3)
            assert served.healthy(GPU) == sorted(SIMULATED[:3])
            assert (await aside(states, daemon))[3] == "bad"
            refusal = (await aside(node.cri.refused, "device=3", "unlucky")).details
            assert "XID 46, GPU stopped processing; a reset is due" in refusal
            said = await aside(daemon.verb, "repaired", "3")
            assert (said.returncode, SIMULATED[3] in said.stdout) == (0, True), said.stderr
            assert (await aside(daemon.verb, "repaired", "3")).returncode == 1
            await served.wait_healthy(GPU, 4)
            assert '"kind":"repaired"' in (daemon.launch.state / "audit.jsonl").read_text()
            assert (await aside(daemon.verb, "status")).stdout.count("last XID") == 4


def edited(daemon: NriGpu, text: str) -> None:
    """The node is this from now on."""
    assert daemon.launch.topology
    daemon.launch.topology.write_text(text)
    daemon.hang_up()


def without_first(text: str) -> str:
    """The node when its first GPU is not listed any more."""
    blocks = re.split(r"(?m)^(?=\[\[)", text)
    return "".join(each for each in blocks if not re.match(r"\[\[(gpu\]\]\nindex|link\]\]\na) = 0\b", each))


NODE = FOUR_GPUS.read_text()


@pytest.mark.parametrize(
    ("after", "why"),
    [
        pytest.param(NODE + "\n[[event]]\nat_s = 0\ngpu = 0\nxid = 79\n", BAD, id="a fatal XID"),
        pytest.param(
            NODE.replace("[[gpu]]\n", '[[gpu]]\nsigns = "remap-failed"\n', 1),
            "a row of its memory could not be remapped",
            id="a fatal sign",
        ),
        pytest.param(
            without_first(NODE) + f'\n[[fault]]\nindex = 0\nreason = "{LOST}"\ncode = 15\nsign = "lost"\n',
            LOST,
            id="it cannot be described any more",
        ),
        pytest.param(
            without_first(NODE), "GPU is lost: NVML does not list it any more", id="it is not even listed any more"
        ),
    ],
)
def test_a_container_on_a_bad_gpu_is_stopped_and_its_pods_next_one_gets_another(
    node: Containerd, tmp_path: Path, after: str, why: str
) -> None:
    """In place, where policy says so; and whoever has another GPU runs on."""
    with simulated(node, tmp_path, containers="stop") as daemon:
        stays = node.cri.run_asking("device=1", "stays")
        pod = node.cri.asking("count=1", "moves")
        first = node.cri.run(pod)
        daemon.wait_held({"stays/main": [SIMULATED[1]], "moves/main": [SIMULATED[0]]})
        edited(daemon, after)
        daemon.wait_logged(STOPPED + why)
        wait_stopped(node, first)
        assert why in daemon.verb("status").stdout
        node.cri.remove(first)
        second = node.cri.run(pod)
        wait_for("another grant", lambda: bool(held(daemon) & {*SIMULATED[2:]}), 20)
        assert [node.cri.status(each).state for each in (stays, second)] == ["RUNNING", "RUNNING"]


@on_newest
@in_a_loop
async def test_a_fabric_that_is_not_ready_keeps_its_gpus_from_all_and_stops_nobody(
    node: Containerd, tmp_path: Path, folder: Path
) -> None:
    """By both doors; and they are granted as soon as it is up, without a hold-down."""
    waiting = re.sub(r"(?m)^\[\[gpu\]\]$", '[[gpu]]\nsigns = "fabric-not-ready"', NODE)
    plugin = f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\ncdi_dir = "{node.layout.cdi}"\n'
    with simulated(node, tmp_path) as daemon:
        daemon.launch.with_policy(policy(node, containers="stop", reprobe_s=1) + plugin)
        await aside(daemon.restart)
        runs = await aside(node.cri.run_asking, "device=0", "runs")
        async with Kubelet(folder) as kubelet:
            await kubelet.wait_healthy(GPU, 3)
            await aside(edited, daemon, waiting)
            await kubelet.wait_healthy(GPU, 0)
            assert kubelet.capacity(GPU) == 4
            refusal = (await aside(node.cri.refused, "1", "unlucky")).details
            assert "see the fabric manager; on NVL72 also IMEX and switch trays;" in refusal
            assert states(daemon) == ["healthy"] * 4
            await aside(edited, daemon, NODE)
            await kubelet.wait_healthy(GPU, 3)
            await kubelet.admit("train", "main", {GPU: 1})
        assert node.cri.status(runs).state == "RUNNING"


@on_newest
def test_a_gpu_that_was_lost_while_nobody_ran(node: Containerd, tmp_path: Path) -> None:
    """The runtime tells who holds it, after the first look; at first policy says to report."""
    with simulated(node, tmp_path) as daemon:
        container, stays = node.cri.run_asking("device=0", "unlucky"), node.cri.run_asking("device=1", "stays")
        daemon.wait_grants(2)
        daemon.kill()
        assert daemon.launch.topology
        daemon.launch.topology.write_text(without_first(NODE))
        daemon.start()
        daemon.wait_ready()
        assert SIMULATED[0] in daemon.wait_logged("container holds an unhealthy GPU")
        assert "GPU is lost" in daemon.verb("status").stdout
        assert node.cri.status(container).state == "RUNNING"
        daemon.launch.with_policy(policy(node, containers="stop"))
        daemon.hang_up()
        daemon.wait_logged(STOPPED)
        wait_stopped(node, container)
        assert node.cri.status(stays).state == "RUNNING"


@on_newest
def test_nvml_tells_of_a_held_gpu_while_creates_go_on(node: Containerd, tmp_path: Path) -> None:
    """The driver's own way: events of the GPUs that are listened to, through the unmodified binding."""
    old = FakeHealth(recovery_action=-1)  # a driver that has none
    root = build_fake_nvml(make_driver_root(tmp_path / "driver"), [FakeGpu(uuid=uuid, health=old) for uuid in UUIDS])
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    with NriGpu(launch.with_policy(policy(node, events="all", hold_down_s=3, reprobe_s=1, reset="quiet"))) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("listening for GPU errors gpus=4")
        happen(root, 1, EventType.XID, 79)
        line = daemon.wait_logged(CHANGED)
        assert UUIDS[1] in line
        assert BAD in line
        node.cri.run(node.cri.run_pod())
        assert states(daemon)[0] == states(daemon)[2] == "healthy"
        wait_for("GPU 1 to recover", lambda: states(daemon)[1] == "healthy", 30)


@on_newest
def test_the_driver_decides_by_its_recovery_action(node: Containerd, tmp_path: Path) -> None:
    """It takes back what the catalogue says of GPU 0, and calls GPU 1 bad for what any program can cause."""
    demands = FakeHealth(recovery_action=1)
    gpus = [FakeGpu(uuid=uuid) for uuid in UUIDS]
    root = build_fake_nvml(make_driver_root(tmp_path / "driver"), gpus)
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    with NriGpu(launch.with_policy(policy(node, events="all", reprobe_s=1))) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("listening for GPU errors gpus=4")
        happen(root, 0, EventType.XID, 46)
        assert "recovery action is none" in daemon.wait_logged(f'{CHANGED} reason="XID 46, GPU stopped processing: ')
        configure(root, [gpus[0], replace(gpus[1], health=demands), *gpus[2:]])
        happen(root, 1, EventType.XID, 13)
        wait_for("GPU 1 to be bad", lambda: states(daemon)[:2] == ["healthy", "bad"], 20)
        assert daemon.status()["gpus"][1]["health"]["why"] == "GPU requires a reset"
