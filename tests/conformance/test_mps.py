"""Mode mps on a real containerd: containers of one GPU meet at one daemon, which lives as long as they need it.

What they write there is bounded, and whoever comes after them meets none of it.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import mps, packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.image import NAME
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

pytestmark = on_newest

UUID = UUIDS[0]
POLICY = "[mps]\nenabled = true\nlinger_s = {linger_s}\nmost_threads_percent = 60\n"
MPS: Final = "device=0;mode=mps"
# What a container refused at its start is told: its kubelet makes it anew.
ANEW: Final = (
    rf"nri-gpu \[node-not-ready\].*MPS daemon of {UUID} (is not up yet|that this container was created for has ended)"
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mps.shared(tmp_path_factory.mktemp("run")) as folder:
        yield folder


@pytest.fixture(scope="module")
def mps_node(runtime: packages.Runtime, run_folder: Path) -> Iterator[Containerd]:
    assert run_folder.is_dir()
    with Containerd(runtime) as running:
        yield running


@pytest.fixture
def node(mps_node: Containerd) -> Iterator[Containerd]:
    yield mps_node
    mps_node.cri.remove_all()


@pytest.fixture
def bare(node: Containerd, run_folder: Path, tmp_path: Path) -> Iterator[Launch]:
    """A node with MPS's programs, and without the file system for what its clients write."""
    root = mps.install(make_driver_root(tmp_path / "driver"), tmp_path / "modes")
    launch = Launch(run_folder / tmp_path.name / "d", node.nri_socket, driver_root=root)
    launch.base.parent.mkdir()
    made = launch.with_policy(POLICY.format(linger_s=60))
    yield made
    mps.end_all(made.state)  # whatever ran them has ended


@pytest.fixture
def launch(bare: Launch) -> Iterator[Launch]:
    with mps.client_files(bare.state):
        yield bare


def run(node: Containerd, name: str, value: str = MPS, using: str = NAME) -> ContainerId:
    return node.cri.run_persistently(node.cri.asking(value, name), ContainerSpec(image=using), ANEW, 20)


def pid_of(daemon: NriGpu) -> int:
    return mps.noted_pid(daemon.launch.state, UUID)


def folder_of(daemon: NriGpu) -> Path:
    place = mps.noted(daemon.launch.state, UUID)
    assert place
    return place.folder


def folders(daemon: NriGpu) -> set[str]:
    """All names there, but for those of the next daemons of other GPUs."""
    every = {path.name for path in (daemon.launch.state / "mps" / "clients").iterdir()}
    return {name for name in every if not name.startswith(tuple(UUIDS[1:]))}


def does(node: Containerd, container: ContainerId, script: str) -> str:
    """What a shell in the container says, to whom."""
    done = node.cri.execute(container, "/bin/sh", "-c", script, timeout_s=60)
    return done.stdout + done.stderr


def end(node: Containerd, container: ContainerId) -> None:
    node.cri.stop(container)
    node.cri.remove(container)


def test_two_containers_meet_at_one_daemon(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    one = run(node, "one", "device=0; mode=mps; sharing=memory:10Gi,threads:50")
    two = run(node, "two", "device=0; mode=mps; sharing=memory:30Gi")
    assert len([line for line in daemon.log().splitlines() if "MPS daemon started" in line]) == 1

    folder = folder_of(daemon)
    started = json.loads((folder / "log/started").read_text())
    assert started["CUDA_VISIBLE_DEVICES"] == UUID
    assert started["CUDA_MPS_PIPE_DIRECTORY"] == f"{daemon.launch.state}/pipe"
    assert "/drivers/" in started["LD_LIBRARY_PATH"]
    assert "set_default_active_thread_percentage 60" in (folder / "log/output").read_text()
    assert (tmp_path / "modes").read_text() == f"{UUID} EXCLUSIVE_PROCESS\n"

    env = node.cri.status(one).env
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert node.cri.status(two).env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    for container in (one, two):
        seen = node.cri.execute(container, "/bin/sh", "-c", "ls $CUDA_MPS_PIPE_DIRECTORY; cat /dev/shm/cuda.shm")
        pipes, said = seen.stdout.split()[:-3], seen.stdout.split()[-3:]
        assert pipes == ["control", "control_lock", "log", "nvidia-cuda-mps-control.pid"]
        assert said == ["of", "the", "daemon"]
    assert node.cri.execute(one, "/bin/sh", "-c", "echo here > /dev/shm/client").code == 0
    assert node.cri.execute(two, "/bin/cat", "/dev/shm/client").stdout == "here\n"

    # Shares are counted, and no other mode comes in.
    for value, code in (("device=0;mode=mps;sharing=memory:1Gi", "over-limit"), ("device=0;mode=shared", "gpu-busy")):
        assert f"nri-gpu [{code}]" in node.cri.refused(value, code).details


def test_the_daemon_outlives_ours_and_ends_with_its_last_user(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    one, two = run(node, "one"), run(node, "two", "device=0;mode=mps;sharing=memory:20Gi")
    pid = pid_of(daemon)
    daemon.launch.with_policy(POLICY.format(linger_s=0))
    daemon.restart(kill=True)
    daemon.wait_logged("MPS daemon taken over")
    assert pid_of(daemon) == pid
    run(node, "three", "device=0;mode=mps;sharing=memory:20Gi")
    four = node.cri.refused("device=0;mode=mps;sharing=memory:1Gi", "four")
    assert "Mi are shares of other containers already" in four.details  # two's came back, too
    end(node, one)
    end(node, two)
    assert pid_of(daemon) == pid
    node.cri.remove_all()
    daemon.wait_logged("MPS daemon ended")
    assert pid_of(daemon) == 0
    assert (tmp_path / "modes").read_text().splitlines()[-1] == f"{UUID} DEFAULT"


def test_nobody_starts_while_the_daemon_is_down(node: Containerd, daemon: NriGpu) -> None:
    one = run(node, "one")
    first, own = pid_of(daemon), folder_of(daemon)
    (program,) = (daemon.launch.base / "drivers").glob("*/compute+utility/lib64/bin/nvidia-cuda-mps-control")
    program.rename(program.with_name("away"))  # so that no other can be started meanwhile
    waiting = node.cri.create(node.cri.asking(MPS, "waiting"))
    os.kill(first, signal.SIGKILL)
    assert "is not up yet" in node.cri.refused(MPS, "two").details
    daemon.wait_logged("MPS daemon ended by itself")
    daemon.wait_logged("MPS daemon not up")
    assert "is not up yet" in node.cri.refused(MPS, "early").details  # though the next one's folder has another name
    for refused in ("two", "early"):
        node.cri.remove_pod_named(refused)
    program.with_name("away").rename(program)
    wait_for("the next daemon", lambda: pid_of(daemon) not in (0, first), 20)
    run(node, "three")
    assert node.cri.status(one).state == "RUNNING"
    (line,) = [line for line in daemon.verb("status").stdout.splitlines() if "restart it" in line]
    assert line.startswith("default/one, container main: its MPS daemon has ended")
    # Its program may have files open there.
    wait_for("two folders", lambda: folders(daemon) == {own.name, folder_of(daemon).name}, 10)
    with pytest.raises(CriError, match="that this container was created for has ended"):
        node.cri.start(waiting)
    # A daemon after ours reads it off the containers.
    daemon.restart(kill=True)
    daemon.wait_logged("MPS daemon taken over")
    assert line in daemon.verb("status").stdout.splitlines()
    end(node, one)
    node.cri.remove(waiting)
    wait_for("the old folder to go", lambda: folders(daemon) == {folder_of(daemon).name}, 10)
    assert "restart it" not in daemon.verb("status").stdout
    # Its GPU goes to nobody else before the daemon has gone.
    node.cri.remove_all()
    pod = node.cri.asking("device=0", "other")
    refused = node.cri.create(pod)
    try:
        node.cri.start(refused)
    except CriError as error:
        assert "is being ended" in error.details
    daemon.wait_logged("MPS daemon ended gpu_uuid")
    node.cri.remove(refused)
    node.cri.run(pod, ContainerSpec(attempt=1))
    assert pid_of(daemon) == 0


def test_what_tenants_write_is_bounded_and_the_pipes_are_not_theirs(
    node: Containerd, daemon: NriGpu, tmp_path: Path
) -> None:
    node.import_image(mps.client_image(tmp_path))
    tenant = run(node, "tenant", using=mps.IMAGE)
    assert "No space left on device" in does(node, tenant, "cat /dev/zero > /dev/shm/all")
    room = os.statvfs(daemon.launch.state / "mps" / "clients")
    assert room.f_blocks * room.f_frsize == mps.SIZE_MIB << 20
    does(node, tenant, "rm /dev/shm/all")
    assert "No space left on device" in does(node, tenant, "mkdir /dev/shm/m; cd /dev/shm/m; seq 5000 | xargs touch")
    does(node, tenant, "rm -r /dev/shm/m")
    for attempt in (
        "cat /dev/zero > /tmp/nvidia-mps/all",
        "echo 1 > /tmp/nvidia-mps/control_lock",
        "mkdir /tmp/nvidia-mps/control.new",
        "rm -f /tmp/nvidia-mps/control",
        "rm -f /tmp/nvidia-mps/nvidia-cuda-mps-control.pid",
        "ln -s /etc/passwd /tmp/nvidia-mps/nvidia-cuda-mps-server.pid",
    ):
        assert "Read-only file system" in does(node, tenant, attempt)
    # And yet it is a client, whoever it runs as.
    asks = "/bin/mps_client {} get_default_active_thread_percentage"
    assert does(node, tenant, asks.format("")) == "60.0\n"
    assert does(node, tenant, f"start-stop-daemon -S -c 1000:1000 -x {asks.format('--')}") == "60.0\n"


def test_the_next_tenant_meets_nothing_of_the_last_one(node: Containerd, daemon: NriGpu, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("ours")
    one = run(node, "one")
    first, pid = folder_of(daemon), pid_of(daemon)
    # What once stopped the daemon of this GPU for ever, or had root write elsewhere; and folders deeper than a process
    # has descriptors.
    does(
        node,
        one,
        f"cd /dev/shm; echo of one > secret; rm cuda.shm; ln -s {victim} cuda.shm; ln -s / root; mkdir shm control; "
        "mkdir closed; touch closed/in; chown -R 1000:1000 closed; chmod 700 closed; "
        "i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || exit; i=$((i+1)); done",
    )
    assert (first / "shm" / "secret").read_text() == "of one\n"
    end(node, one)  # and the daemon would linger for a minute
    wait_for("a daemon for the next", lambda: pid_of(daemon) not in (0, pid), 10)
    two = run(node, "two")
    assert does(node, two, "ls /dev/shm; cat /dev/shm/cuda.shm") == "cuda.shm\nof the daemon"
    assert victim.read_text() == "ours"
    wait_for("what it left to go", lambda: folders(daemon) == {folder_of(daemon).name}, 10)
    assert folder_of(daemon) != first
    assert "not removed" not in daemon.log()


def test_without_a_bound_nobody_is_let_in(node: Containerd, bare: Launch) -> None:
    with staged(bare):
        refusal = node.cri.refused(MPS, "one").details
        assert re.search(r"no file system of its own is mounted at .*/mps/clients", refusal)
        assert r"start the systemd unit run-nri\x2dgpu-mps-clients.mount" in refusal
        with mps.client_files(bare.state):
            wait_for("the mount to be seen", lambda: created(node, "two"), 10)
            run(node, "three")
            node.cri.remove_all()


def created(node: Containerd, name: str) -> bool:
    try:
        node.cri.create(node.cri.asking(MPS, name))
    except CriError:
        return False
    return True
