"""A GPU turns bad under a real containerd: the next containers go elsewhere, and it comes back."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.daemon import UUIDS as SIMULATED
from tests.support.kubelet import Kubelet
from tests.support.marks import on_newest
from tests.support.waiting import aside, in_a_loop, wait_for

pytestmark = pytest.mark.containerd

UUIDS = tuple(f"GPU-{n}b200000-0000-4000-8000-00000000000{n}" for n in range(4))
GPU = "nvidia.com/gpu"
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
