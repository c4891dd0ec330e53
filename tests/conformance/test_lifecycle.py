"""A container's end, however it comes, frees its GPUs; no restart of anybody loses a grant or makes a second one."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, PodId
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

MANY = 25


@pytest.fixture
def own(fresh_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    """Serving a containerd that the test may kill."""
    launch = Launch(tmp_path / "d", fresh_node.nri_socket, driver_root=make_driver_root(tmp_path / "driver"))
    with NriGpu(launch) as daemon:
        daemon.wait_staged()
        yield daemon


def start(node: Containerd, name: str, value: str, *command: str) -> ContainerId:
    pod = node.cri.asking(value, name)
    return node.cri.run(pod, ContainerSpec(command=command or ("/bin/sleep", "600")))


def test_one_that_exits_by_itself_frees_its_gpus(node: Containerd, daemon: NriGpu) -> None:
    start(node, "short", "device=0", "/bin/true")
    daemon.wait_held({})
    start(node, "next", "device=0")
    daemon.wait_held({"next/main": [UUIDS[0]]})


def test_one_that_is_killed_frees_its_gpus(node: Containerd, daemon: NriGpu) -> None:
    container = start(node, "victim", "device=0")
    daemon.wait_held({"victim/main": [UUIDS[0]]})
    os.kill(node.cri.status(container).pid, signal.SIGKILL)
    daemon.wait_held({})


def test_one_that_fails_to_start_frees_its_gpus_when_it_is_made_again(node: Containerd, daemon: NriGpu) -> None:
    """A start that fails inside runc sends no event at all; the next attempt of the same container shows it is over."""
    pod = node.cri.asking("device=0", "p")
    broken = node.cri.create(pod, ContainerSpec(command=("/no/such/program",)))
    with pytest.raises(CriError):
        node.cri.start(broken)
    node.cri.run(pod, ContainerSpec(attempt=1, command=("/bin/sleep", "600")))
    daemon.wait_held({"p/main": [UUIDS[0]]})
    assert len(daemon.ledger()["grants"]) == 1


@on_newest
def test_one_that_was_never_started_frees_its_gpus_after_the_grace(node: Containerd, launch: Launch) -> None:
    policy = launch.base.parent / "policy.toml"
    policy.write_text("schema = 1\n[ledger]\ncreated_grace_s = 5\n")
    changed = Launch(launch.base, launch.socket, driver_root=launch.driver_root, policy=policy)
    with NriGpu(changed) as daemon:
        daemon.wait_staged()
        pod = node.cri.asking("device=0", "idle")
        idle = node.cri.create(pod, ContainerSpec(command=("/bin/sleep", "600")))

        def taken() -> bool:
            try:
                start(node, "next", "device=0")
            except CriError:
                return False
            return True

        assert not taken()
        wait_for("the grace to pass", taken, 20)
        with pytest.raises(CriError, match=r"\[gpu-busy\].*created but not started"):
            node.cri.start(idle)
        daemon.wait_held({"next/main": [UUIDS[0]]})


def test_removal_and_the_end_of_the_pod_free_gpus(node: Containerd, daemon: NriGpu) -> None:
    removed = start(node, "one", "device=0")
    start(node, "two", "device=1")
    node.cri.remove(removed)
    daemon.wait_held({"two/main": [UUIDS[1]]})
    node.cri.remove_pod(PodId(next(pod.id for pod in node.cri.pods() if pod.metadata.name == "two")))
    daemon.wait_held({})


def test_the_plugin_killed_between_creates_has_the_same_ledger(node: Containerd, daemon: NriGpu) -> None:
    start(node, "a", "device=0,1; mode=shared")
    start(node, "b", "device=2")
    pod = node.cri.asking("device=3", "c")
    created = node.cri.create(pod, ContainerSpec(command=("/bin/sleep", "600")))
    held = {"a/main": UUIDS[:2], "b/main": [UUIDS[2]], "c/main": [UUIDS[3]]}
    daemon.wait_held(held)
    before = daemon.ledger()

    daemon.kill()
    (daemon.launch.state / "ledger.json").unlink()  # the containers' signed grants are the truth, not the file
    daemon.start()
    daemon.wait_ready()

    daemon.wait_held(held)
    assert _by_id(daemon) == {grant["container_id"]: grant for grant in before["grants"]}
    daemon.wait_logged("driver files staged")
    with pytest.raises(CriError, match=r"\[gpu-busy\]"):
        start(node, "d", "device=2")
    node.cri.start(created)
    start(node, "e", "device=0; mode=shared")


def test_what_ended_while_the_plugin_was_away_is_free(node: Containerd, daemon: NriGpu) -> None:
    gone = start(node, "gone", "device=0")
    stays = start(node, "stays", "device=1")
    daemon.kill()
    node.cri.stop(gone)
    daemon.start()
    daemon.wait_ready()
    daemon.wait_held({"stays/main": [UUIDS[1]]})
    assert node.cri.status(stays).state == "RUNNING"


def test_one_created_while_the_plugin_was_away_does_not_start(node: Containerd, daemon: NriGpu) -> None:
    """NRI lets it be created without us; it asked for a GPU, so it must not run without one."""
    daemon.kill()
    pod = node.cri.asking("1", "p")
    ungranted = node.cri.create(pod, ContainerSpec())
    bystander = node.cri.create(node.cri.run_pod(PodSpec(name="q")), ContainerSpec(command=("/bin/sleep", "60")))
    daemon.start()
    daemon.wait_ready()
    with pytest.raises(CriError, match=r"\[not-granted\].*create it again"):
        node.cri.start(ungranted)
    node.cri.start(bystander)
    daemon.wait_logged("created without nri-gpu")


def test_containerd_killed_and_restarted(fresh_node: Containerd, own: NriGpu) -> None:
    survivor = start(fresh_node, "survivor", "device=0,1")
    victim = start(fresh_node, "victim", "device=2")
    pid = fresh_node.cri.status(victim).pid
    own.wait_held({"survivor/main": UUIDS[:2], "victim/main": [UUIDS[2]]})

    fresh_node.kill()
    own.wait_logged("reconnecting")
    os.kill(pid, signal.SIGKILL)
    fresh_node.restart()

    wait_for("a second session", lambda: own.log().count("ledger rebuilt") == 2, 20, own.log)
    own.wait_held({"survivor/main": UUIDS[:2]})
    assert fresh_node.cri.status(survivor).state == "RUNNING"
    start(fresh_node, "next", "device=2")
    with pytest.raises(CriError, match=r"\[gpu-busy\]"):
        start(fresh_node, "late", "device=0")
    fresh_node.cri.stop(survivor)
    own.wait_held({"next/main": [UUIDS[2]]})


@on_newest
def test_many_containers_eight_at_a_time(node: Containerd, daemon: NriGpu) -> None:
    """Four of five share, the fifth asks for a GPU of its own; nobody gets what excludes another."""

    def one(number: int) -> str:
        value = "count=1; mode=shared; model=*A100*" if number % 5 else "1"
        try:
            start(node, f"p{number}", value)
        except CriError as error:
            assert "[gpu-busy]" in error.details
            return "refused"
        return "granted"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(one, range(MANY)))

    granted = outcomes.count("granted")
    wait_for("the ledger", lambda: len(daemon.ledger()["grants"]) == granted, 20, lambda: str(daemon.ledger()))
    modes: dict[str, list[str]] = {}
    for grant in daemon.ledger()["grants"]:
        for uuid in grant["gpu_uuids"]:
            modes.setdefault(uuid, []).append(grant["mode"])
    assert granted >= 4
    assert all(set(held) == {"shared"} or held == ["exclusive"] for held in modes.values()), modes
    assert outcomes.count("refused") == MANY - granted
    node.cri.remove_all()
    daemon.wait_held({})


def _by_id(daemon: NriGpu) -> dict[str, object]:
    return {grant["container_id"]: grant for grant in daemon.ledger()["grants"]}
