"""A GPU turns bad under a container: a real runtime stops that, and its pod's next one gets another GPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.daemon import FOUR_GPUS, UUIDS, Launch, NriGpu
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

BAD = "XID 79, GPU has fallen off the bus"
STOPPED = 'container stopped reason="its GPU is bad: '
LOST = "nvmlDeviceGetHandleByIndex: GPU is lost (15)"


@contextmanager
def stopping(node: Containerd, base: Path) -> Iterator[NriGpu]:
    """A daemon that stops containers on bad GPUs."""
    topology = base / "node.toml"
    topology.write_text(NODE)
    policy = f'[health]\ncontainers = "stop"\n[guard]\ncri_socket = "{node.cri_socket}"\nstop_grace_s = 0\n'
    with NriGpu(Launch(base / "d", node.nri_socket, topology=topology).with_policy(policy)) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("driver files")  # found or not: before, it refuses
        yield daemon


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
    with stopping(node, tmp_path) as daemon:
        stays = node.cri.run_asking("device=1", "stays")
        pod = node.cri.asking("count=1", "moves")
        first = node.cri.run(pod)
        daemon.wait_held({"stays/main": [UUIDS[1]], "moves/main": [UUIDS[0]]})
        (tmp_path / "node.toml").write_text(after)
        daemon.hang_up()
        daemon.wait_logged(STOPPED + why)
        wait_for("its stop", lambda: node.cri.status(first).state == "EXITED", 20)
        assert why in daemon.verb("status").stdout
        node.cri.remove(first)
        second = node.cri.run(pod)
        wait_for("another grant", lambda: daemon.held().get("moves/main", UUIDS[:1]) != UUIDS[:1], 20)
        assert [node.cri.status(each).state for each in (stays, second)] == ["RUNNING", "RUNNING"]
