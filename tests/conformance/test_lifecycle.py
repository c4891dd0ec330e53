"""A container's end, however it comes, frees its GPUs; no restart of anybody loses a grant or makes a second one."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from nri_gpu.ledger.entries import STARTS_S
from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import READY_S, UUIDS, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec
from tests.support.runc_gate import Gate
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

ENDING = 16  # containers that end
ENDS_EVERY_S = 0.003
CONNECTS = "inventory changed"  # logged right before the daemon connects


def test_one_that_is_killed_frees_its_gpus(node: Containerd, daemon: NriGpu) -> None:
    container = node.cri.run_asking("device=0", "victim")
    daemon.wait_held({"victim/main": [UUIDS[0]]})
    os.kill(node.cri.status(container).pid, signal.SIGKILL)
    daemon.wait_held({})


def test_one_that_fails_to_start_frees_its_gpus_when_it_is_made_again(node: Containerd, daemon: NriGpu) -> None:
    """A start that fails inside runc sends no event at all; the next attempt of the same container shows it is over."""
    pod = node.cri.asking("device=0", "p")
    broken = node.cri.create(pod, ContainerSpec(command=("/no/such/program",)))
    with pytest.raises(CriError):
        node.cri.start(broken)
    node.cri.run(pod, ContainerSpec(attempt=1))
    daemon.wait_held({"p/main": [UUIDS[0]]})
    wait_for("the ledger", lambda: [each["phase"] for each in daemon.ledger()["grants"]] == ["lapsed", "running"], 5)


@pytest.mark.short
def test_one_that_is_stopped_during_its_start_runs_and_holds(runtime: packages.Runtime, folder: Path) -> None:
    """The runtime answers StopContainer, tells us of it, and starts the container all the same."""
    gate = Gate(folder)
    with (
        Containerd(runtime, runc=gate.runc) as node,
        staged(launch_on(node, folder)) as daemon,
        ThreadPoolExecutor(1) as beside,
    ):
        container = node.cri.create(node.cri.asking("device=0", "p"))
        with gate.shut():
            starting = beside.submit(node.cri.start, container)
            gate.wait_reached()
            node.cri.stop(container)
        starting.result(READY_S)
        time.sleep(STARTS_S)
        assert node.cri.status(container).state == "RUNNING"
        assert not daemon.status()["lost"]
        assert "[gpu-busy]" in node.cri.refused("device=0", "next").details
        node.cri.stop(container)
        daemon.wait_held({})
        assert not daemon.status()["lost"]


@pytest.mark.short
def test_the_plugin_killed_between_creates_has_the_same_ledger(node: Containerd, daemon: NriGpu) -> None:
    node.cri.run_asking("device=0,1; mode=shared", "a")
    node.cri.run_asking("device=2", "b")
    pod = node.cri.asking("device=3", "c")
    created = node.cri.create(pod)
    held = {"a/main": UUIDS[:2], "b/main": [UUIDS[2]], "c/main": [UUIDS[3]]}
    daemon.wait_held(held)
    before = _by_id(daemon)

    daemon.kill()
    (daemon.launch.state / "ledger.json").unlink()  # the containers' signed grants are the truth, not the file
    daemon.start()
    daemon.wait_ready()

    daemon.wait_held(held)
    assert _by_id(daemon) == before
    daemon.wait_logged("driver files staged")
    with pytest.raises(CriError, match=r"\[gpu-busy\]"):
        node.cri.run_asking("device=2", "d")
    node.cri.start(created)
    node.cri.run_asking("device=0; mode=shared", "e")


def end_each(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(ENDS_EVERY_S)


def test_those_that_end_as_containerd_comes_back_free_their_gpus(fresh_node: Containerd, fresh_daemon: NriGpu) -> None:
    """One after another, before we register and after: of some it tells nobody, as it synchronizes its plugins then."""

    def run(number: int) -> int:
        return fresh_node.cri.status(fresh_node.cri.run_asking("device=0; mode=shared", f"p{number}")).pid

    with NriGuard(fresh_daemon.launch) as guard, ThreadPoolExecutor(4) as pool:
        guard.wait_ready()
        pids = list(pool.map(run, range(ENDING)))
        fresh_node.cri.run_asking("device=1", "stays")
        fresh_node.kill()
        socket = fresh_node.nri_socket
        killed_at = socket.stat().st_ctime

        def listens_anew() -> bool:
            with suppress(FileNotFoundError):
                return socket.stat().st_ctime > killed_at
            return False

        def end() -> None:
            wait_for("containerd", listens_anew, READY_S, poll_s=0.001)
            end_each(pids)

        ending = pool.submit(end)
        fresh_node.restart()
        ending.result()
        fresh_daemon.wait_session(2)
        fresh_daemon.wait_held({"stays/main": [UUIDS[1]]})


def test_those_that_end_as_the_daemon_comes_back_free_their_gpus(fresh_node: Containerd, fresh_daemon: NriGpu) -> None:
    """They started while it was away: those that end while containerd lists them are listed as running."""
    cri = fresh_node.cri

    def create(number: int) -> ContainerId:
        return cri.create(cri.asking("device=0; mode=shared", f"p{number}"), ContainerSpec())

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(create, range(ENDING)))
        cri.run_asking("device=1", "stays")
        fresh_daemon.kill()
        list(pool.map(cri.start, made))
        pids = [cri.status(each).pid for each in made]

        def end() -> None:
            wait_for("the daemon", lambda: fresh_daemon.log().count(CONNECTS) == 2, READY_S, poll_s=0.001)
            end_each(pids)

        fresh_daemon.start()
        ending = pool.submit(end)
        fresh_daemon.wait_ready()
        ending.result()

    def given() -> bool:
        with contextlib.suppress(CriError):
            return bool(cri.run_asking("device=0", "next"))
        return False

    wait_for("the GPU", given, READY_S, explain=lambda: str(fresh_daemon.held()))


@pytest.mark.short
def test_containerd_killed_and_restarted(fresh_node: Containerd, fresh_daemon: NriGpu) -> None:
    survivor = fresh_node.cri.run_asking("device=0,1", "survivor")
    victim = fresh_node.cri.run_asking("device=2", "victim")
    pid = fresh_node.cri.status(victim).pid
    fresh_daemon.wait_held({"survivor/main": UUIDS[:2], "victim/main": [UUIDS[2]]})

    fresh_node.kill()
    fresh_daemon.wait_logged("reconnecting")
    os.kill(pid, signal.SIGKILL)
    fresh_node.restart()

    fresh_daemon.wait_session(2)
    fresh_daemon.wait_held({"survivor/main": UUIDS[:2]})
    assert fresh_node.cri.status(survivor).state == "RUNNING"
    fresh_node.cri.run_asking("device=2", "next")
    with pytest.raises(CriError, match=r"\[gpu-busy\]"):
        fresh_node.cri.run_asking("device=0", "late")
    fresh_node.cri.stop(survivor)
    fresh_daemon.wait_held({"next/main": [UUIDS[2]]})


def _by_id(daemon: NriGpu) -> dict[str, object]:
    """The grants without their age, which only the file keeps."""
    return {grant["container_id"]: grant | {"since_s": None} for grant in daemon.ledger()["grants"]}
