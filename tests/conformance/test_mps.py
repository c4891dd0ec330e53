"""Mode mps on a real containerd: containers of one GPU meet at one daemon, which lives as long as they need it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import mps
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

UUID = "GPU-0a100004-0000-4000-8000-000000000000"
POLICY = "[mps]\nenabled = true\nlinger_s = {linger_s}\nmost_threads_percent = 60\n"
SLEEP = ("/bin/sleep", "600")


@pytest.fixture
def launch(node: Containerd, tmp_path: Path) -> Iterator[Launch]:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(linger_s=60))
    root = mps.install(make_driver_root(tmp_path / "driver"), tmp_path / "modes")
    made = Launch(tmp_path / "d", node.nri_socket, driver_root=root, policy=policy)
    yield made
    mps.end_all(made.state)


def run(node: Containerd, name: str, value: str = "device=0;mode=mps", user: int | None = None) -> ContainerId:
    """As a kubelet does: a container whose start is refused is made anew."""
    pod = node.cri.run_pod(PodSpec(name=name, annotations={"gpu.nri.io": value}))
    attempts = iter(range(100))
    running: list[ContainerId] = []

    def started() -> bool:
        container = node.cri.create(pod, ContainerSpec(command=SLEEP, attempt=next(attempts), user=user))
        try:
            node.cri.start(container)
        except CriError as error:
            assert "nri-gpu [node-not-ready]" in error.details
            assert f"MPS daemon of {UUID} is not up yet" in error.details
            node.cri.remove(container)
            return False
        running.append(container)
        return True

    wait_for(f"{name} to start", started, 20)
    return running[0]


def pid_of(daemon: NriGpu) -> int:
    return mps.noted_pid(daemon.launch.state, UUID)


def end(node: Containerd, container: ContainerId) -> None:
    node.cri.stop(container)
    node.cri.remove(container)


def test_two_containers_meet_at_one_daemon(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    one = run(node, "one", "device=0; mode=mps; sharing=memory:10Gi,threads:50")
    two = run(node, "two", "device=0; mode=mps; sharing=memory:30Gi")
    assert len([line for line in daemon.log().splitlines() if "MPS daemon started" in line]) == 1

    folder = daemon.launch.state / "mps" / UUID
    started = json.loads((folder / "log/started").read_text())
    assert started["CUDA_VISIBLE_DEVICES"] == UUID
    assert started["CUDA_MPS_PIPE_DIRECTORY"] == f"{daemon.launch.state}/pipe"
    assert "/drivers/" in started["LD_LIBRARY_PATH"]
    assert "set_default_active_thread_percentage 60" in (folder / "log/control.log").read_text()
    assert (tmp_path / "modes").read_text() == f"{UUID} EXCLUSIVE_PROCESS\n"

    env = node.cri.status(one).env
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert node.cri.status(two).env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    for container in (one, two):
        seen = node.cri.execute(container, "/bin/sh", "-c", "ls $CUDA_MPS_PIPE_DIRECTORY; cat /dev/shm/cuda.shm")
        assert seen.stdout.split() == ["control", "nvidia-cuda-mps-control.pid", "of", "the", "daemon"]
    assert node.cri.execute(one, "/bin/sh", "-c", "echo here > /dev/shm/client").code == 0
    assert node.cri.execute(two, "/bin/cat", "/dev/shm/client").stdout == "here\n"

    # Shares are counted, and no other mode comes in.
    for value, code in (("device=0;mode=mps;sharing=memory:1Gi", "over-limit"), ("device=0;mode=shared", "gpu-busy")):
        pod = node.cri.run_pod(PodSpec(name=code, annotations={"gpu.nri.io": value}))
        with pytest.raises(CriError, match=rf"nri-gpu \[{code}\]"):
            node.cri.create(pod, ContainerSpec(command=SLEEP))


def test_the_daemon_outlives_ours_and_ends_with_its_last_user(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    one, two = run(node, "one"), run(node, "two", "device=0;mode=mps;sharing=memory:20Gi")
    pid = pid_of(daemon)
    daemon.kill()
    assert pid_of(daemon) == pid
    daemon.launch.policy.write_text(POLICY.format(linger_s=0))  # type: ignore[union-attr] # the fixture gave it one
    daemon.start()
    daemon.wait_ready()
    daemon.wait_logged("MPS daemon taken over")
    assert pid_of(daemon) == pid
    run(node, "three", "device=0;mode=mps;sharing=memory:20Gi")
    with pytest.raises(CriError, match="Mi are shares of other containers already"):  # two's came back, too
        node.cri.create(
            node.cri.run_pod(PodSpec(name="four", annotations={"gpu.nri.io": "device=0;mode=mps;sharing=memory:1Gi"}))
        )
    end(node, one)
    end(node, two)
    assert pid_of(daemon) == pid
    node.cri.remove_all()
    daemon.wait_logged("MPS daemon ended")
    assert pid_of(daemon) == 0
    assert (tmp_path / "modes").read_text().splitlines()[-1] == f"{UUID} DEFAULT"


def test_another_user_is_refused(node: Containerd, daemon: NriGpu) -> None:
    run(node, "one", user=1000)
    pod = node.cri.run_pod(PodSpec(name="two", annotations={"gpu.nri.io": "device=0;mode=mps"}))
    container = node.cri.create(pod, ContainerSpec(command=SLEEP, user=1001))
    with pytest.raises(CriError, match=r"serves user id 1000 now, and this container runs as 1001"):
        node.cri.start(container)
    run(node, "three", user=1000)


def test_nobody_starts_while_the_daemon_is_down(node: Containerd, daemon: NriGpu) -> None:
    one = run(node, "one")
    first = pid_of(daemon)
    (program,) = (daemon.launch.base / "drivers").glob("*/compute+utility/lib64/bin/nvidia-cuda-mps-control")
    program.rename(program.with_name("away"))  # so that no other can be started meanwhile
    os.kill(first, signal.SIGKILL)
    pod = node.cri.run_pod(PodSpec(name="two", annotations={"gpu.nri.io": "device=0;mode=mps"}))
    container = node.cri.create(pod, ContainerSpec(command=SLEEP))
    with pytest.raises(CriError, match="is not up yet"):
        node.cri.start(container)
    daemon.wait_logged("MPS daemon ended by itself")
    program.with_name("away").rename(program)
    run(node, "three")
    assert pid_of(daemon) not in (0, first)
    assert node.cri.status(one).state == "RUNNING"
    # Its GPU goes to nobody else before the daemon has gone.
    node.cri.remove_all()
    pod = node.cri.run_pod(PodSpec(name="other", annotations={"gpu.nri.io": "device=0"}))
    refused = node.cri.create(pod, ContainerSpec(command=SLEEP))
    try:
        node.cri.start(refused)
    except CriError as error:
        assert "is being ended" in error.details
    daemon.wait_logged("MPS daemon ended gpu_uuid")
    node.cri.remove(refused)
    node.cri.run(pod, ContainerSpec(command=SLEEP, attempt=1))
    assert pid_of(daemon) == 0
