"""A GPU is held until no process of its container is left, whatever the runtime says of that one or leaves out."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from tests.conformance.conftest import launch_on
from tests.support import packages, threads
from tests.support.cgroup import Cgroup, end_processes, processes
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import READY_S, UUIDS, NriGpu, staged
from tests.support.image import File, ImageSpec
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

IMAGE = "localhost/nri-gpu/threads:1"
CHILDREN = ("/bin/sh", "-c", "sleep 600 & sleep 600 & exec sleep 600")
HELD = {"pod/main": [UUIDS[0]]}


class Holder:
    """A started container with GPU 0 exclusively: its shim, its first process, and all of them."""

    def __init__(self, node: Containerd, container: ContainerId, count: int) -> None:
        self.container = container
        self.first = node.cri.status(container).pid
        self.shim = int(Path(f"/proc/{self.first}/stat").read_text().rpartition(")")[2].split()[1])
        self._freezer = node.container_cgroup(container, "freezer")
        self.cgroup = node.container_cgroup(container)
        wait_for("its processes", lambda: len(self.pids()) == count, READY_S)

    @classmethod
    def with_children(cls, node: Containerd) -> Self:
        pod = node.cri.asking("device=0", host_pid=True)
        return cls(node, node.cri.run(pod, ContainerSpec(command=CHILDREN, host_pid=True)), 3)

    def pids(self) -> list[int]:
        return processes(self.cgroup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        end_processes(self.cgroup, self._freezer)
        with suppress(ProcessLookupError):
            os.kill(self.shim, signal.SIGCONT)
        wait_for("its processes to end", lambda: not self.pids(), READY_S)


def check_lost(node: Containerd, daemon: NriGpu, holder: Holder) -> None:
    """It is shown with what keeps its GPU, which nobody gets; also after a restart, and until the processes end."""
    for _ in range(2):
        wait_for("the container to be lost", lambda: daemon.status()["lost"], READY_S)
        assert "ended, but its processes live on" in node.cri.refused("device=0", "next").details
        node.cri.remove_pod_named("next")
        (lost,) = daemon.status()["lost"]
        assert (lost["pod"], lost["container"], lost["gpu_uuids"]) == ("default/pod", "main", [UUIDS[0]])
        assert lost["cgroup"] == f"/{node.base.name}/{holder.container}"
        assert set(lost["pids"]) == set(holder.pids()) != set()
        daemon.restart(kill=True)
        daemon.wait_staged()
    daemon.wait_logged("container has ended for the runtime, but its processes still hold its GPUs")
    holder.end()
    daemon.wait_held({})


@contextmanager
def served(node: Containerd, folder: Path) -> Iterator[NriGpu]:
    """A daemon on that node, which is abandoned: containerd may never stop what it does not know, and leaves mounts."""
    try:
        node.boot()
        with staged(launch_on(node, folder)) as daemon:
            yield daemon
    finally:
        node.abandon()


def hang(_node: Containerd, holder: Holder) -> None:
    """Its shim hangs as its first process ends, so that nobody ends the others."""
    os.kill(holder.shim, signal.SIGSTOP)
    os.kill(holder.first, signal.SIGKILL)


def pause(node: Containerd, holder: Holder) -> None:
    node.ctr("tasks", "pause", holder.container)
    node.restart()


def pause_and_kill(node: Containerd, holder: Holder) -> None:
    node.ctr("tasks", "pause", holder.container)
    node.restart(kill=True)


@pytest.mark.parametrize(
    ("way", "cgroup"),
    [(hang, Cgroup.V1), (hang, Cgroup.V2), (pause, Cgroup.V2), (pause_and_kill, Cgroup.V1)],
    ids=lambda each: getattr(each, "__name__", str(each)),
    indirect=["cgroup"],
)
def test_it_holds_its_gpu_until_no_process_is_left(
    runtime: packages.Runtime, cgroup: Cgroup, tmp_path: Path, way: Callable[[Containerd, Holder], None]
) -> None:
    node = Containerd(runtime, cgroup=cgroup)
    with served(node, tmp_path) as daemon, Holder.with_children(node) as holder:
        daemon.wait_held(HELD)
        way(node, holder)
        check_lost(node, daemon, holder)


def kill_shim(node: Containerd, holder: Holder) -> None:
    os.kill(holder.shim, signal.SIGKILL)
    wait_for("containerd to notice", lambda: node.cri.status(holder.container).state == "EXITED", READY_S)


@pytest.mark.containerd(packages.Version.V2_1, packages.Version.V2_3)  # the others end its container
def test_one_whose_shim_was_killed(runtime: packages.Runtime, tmp_path: Path) -> None:
    node = Containerd(runtime)
    with served(node, tmp_path) as daemon, Holder.with_children(node) as holder:
        daemon.wait_held(HELD)
        kill_shim(node, holder)
        node.restart()
        check_lost(node, daemon, holder)


@pytest.mark.containerd(packages.Version.V2_1, packages.Version.V2_3)
def test_one_that_started_while_no_daemon_ran_and_whose_first_thread_has_ended(
    runtime: packages.Runtime, cgroup: Cgroup, tmp_path: Path
) -> None:
    node = Containerd(runtime, cgroup=cgroup)
    with served(node, tmp_path) as daemon:
        node.import_image(ImageSpec(IMAGE, extra={"/bin/threads": File(threads.program().read_bytes(), 0o755)}))
        pod = node.cri.asking("device=0")
        container = node.cri.create(pod, ContainerSpec(image=IMAGE, command=("/bin/threads",)))
        daemon.terminate()
        node.cri.start(container)
        with Holder(node, container, 1) as holder:
            threads.wait_started(holder.first)
            threads.end_first(holder.first)
            daemon.start()
            daemon.wait_staged()
            daemon.wait_held(HELD)
            kill_shim(node, holder)
            node.cri.remove(container)
            check_lost(node, daemon, holder)
