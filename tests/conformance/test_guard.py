"""The guard on real runtimes: what asked and was granted nothing never runs, whatever became of the daemon.

A runtime that validates adjustments (NRI 0.10, containerd 2.2) refuses it at its creation, an older one at its start.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from nri_gpu.plugin.guard_status import read_guard_status
from tests.conformance.conftest import launch_on
from tests.support import packages, sandbox
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.runc_gate import Gate
from tests.support.unit_file import OURS
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

ASKS = "device=0"
LATER_S = 0.5  # in which what may happen at once would have happened
REFUSED = r"nri-gpu \[not-granted\]: gpu.nri.io asks for GPUs, but nri-gpu granted it none"
GUARD_UNIT = OURS.with_name("nri-gpu-guard.service")
WITHOUT = "container runs without the GPUs it asked for"


def policy(node: Containerd, *, stopping: bool = True) -> str:
    return f'[guard]\nstop_ungranted = {str(stopping).lower()}\nstop_grace_s = 0\ncri_socket = "{node.cri_socket}"\n'


class Site(Struct, frozen=True):
    """A runtime, and a folder that containers can leave a trace in."""

    node: Containerd
    traces: Path

    def create(
        self, name: str, claim: str = "", namespace: str = "default", given: dict[str, str] | None = None
    ) -> ContainerId:
        """A container whose program would say that it ran. given: annotations of its own."""
        pod = self.node.cri.asking(claim, name, namespace=namespace)
        command = ("/bin/sh", "-c", f"echo ran > /traces/{name}; exec sleep 3600")
        spec = ContainerSpec(command=command, mounts={"/traces": str(self.traces)}, annotations=given or {})
        return self.node.cri.create(pod, spec)

    def refused(self, name: str, claim: str = "", refusal: str = REFUSED, **more: Any) -> CriError:  # noqa: ANN401
        """How such a container is refused. more: arguments of `create`."""
        with pytest.raises(CriError, match=refusal) as caught:
            self.node.cri.start(self.create(name, claim, **more))
        assert not self.ran(name)
        return caught.value

    def ran(self, name: str) -> bool:
        return (self.traces / name).exists()

    def run(self, name: str, claim: str = "", namespace: str = "default") -> ContainerId:
        container = self.create(name, claim, namespace)
        self.node.cri.start(container)
        wait_for(f"{name} to run", lambda: self.ran(name), 20)
        return container

    def state(self, container: ContainerId) -> str:
        return self.node.cri.status(container).state

    def wait_stopped(self, container: ContainerId, guard: NriGuard) -> None:
        wait_for("it to be stopped", lambda: self.state(container) == "EXITED", 20, guard.log)


@pytest.fixture
def site(node: Containerd, tmp_path: Path) -> Site:
    traces = tmp_path / "traces"
    traces.mkdir()
    return Site(node, traces)


@pytest.fixture
def guard(launch: Launch) -> Iterator[NriGuard]:
    with NriGuard(launch) as running:
        running.wait_ready()
        yield running


@pytest.mark.short
def test_created_and_started_while_the_daemon_is_away(site: Site, daemon: NriGpu, guard: NriGuard) -> None:
    granted = site.run("granted", ASKS)
    daemon.kill()

    refusal = site.refused("ungranted", "device=1")
    site.run("innocent")
    site.run("opted-out", "none")

    validated = site.node.runtime.validates
    assert refusal.code == ("UNKNOWN" if validated else "FAILED_PRECONDITION")
    assert "create it again once `nri-gpu run` serves this node" in refusal.details
    assert site.state(granted) == "RUNNING"
    assert "code=not-granted" in guard.wait_logged("container rejected" if validated else "start refused")


@on_newest
def test_a_grant_is_started_although_the_daemon_died_since(site: Site, daemon: NriGpu, guard: NriGuard) -> None:
    container = site.create("train", ASKS)
    daemon.kill()
    site.node.cri.start(container)
    wait_for("it to run", lambda: site.ran("train"), 20)
    assert "/dev/nvidia0" in site.node.cri.status(container).device_paths
    assert "start refused" not in guard.log()


@pytest.mark.short
def test_one_whose_gpu_went_to_another_does_not_start_though_the_daemon_died_since(site: Site, launch: Launch) -> None:
    short = launch.with_policy("schema = 1\n[ledger]\ncreated_grace_s = 5\n")
    with NriGpu(short) as daemon, NriGuard(short) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        late = site.create("late", ASKS)
        spec = ContainerSpec(command=("/bin/sleep", "3600"))
        site.node.cri.run_persistently(site.node.cri.asking(ASKS, "next"), spec, "gpu-busy")
        daemon.kill()
        with pytest.raises(CriError, match=r"\[gpu-busy\].*they have since been granted to another container"):
            site.node.cri.start(late)
        assert not site.ran("late")


@on_newest
@pytest.mark.parametrize("ignored_first", [False, True], ids=["ignored from then on", "ignored until then"])
def test_a_policy_that_is_reloaded_while_a_container_waits_to_start(
    site: Site, launch: Launch, ignored_first: bool
) -> None:
    """The guard's policy follows the daemon's, and its decision, the signed `none`, outlives both."""
    ignoring, strict = '[namespaces]\nallow = ["default"]\notherwise = "ignore"\n', "schema = 1\n"
    changing = launch.with_policy(ignoring if ignored_first else strict)
    with NriGpu(changing) as daemon, NriGuard(changing) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        waiting = site.create("waiting", ASKS, "other") if ignored_first else None
        launch.with_policy(strict if ignored_first else ignoring)
        daemon.reload()
        waiting = waiting or site.create("waiting", ASKS, "other")
        site.node.cri.start(waiting)
        wait_for("it to run", lambda: site.ran("waiting"), 20)
        daemon.kill()
        if ignored_first:
            site.refused("undecided", "device=1", namespace="other")
        else:
            site.run("undecided", "device=1", "other")
        assert guard.seen()["policy_fault"] == ""


@pytest.mark.parametrize("stopping", [False, True], ids=["reported", "stopped"])
def test_what_ran_while_both_were_away(site: Site, launch: Launch, stopping: bool) -> None:
    file = launch.with_policy(policy(site.node, stopping=stopping)).policy
    with NriGpu(launch) as daemon, NriGuard(launch, file) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        granted = site.run("granted", ASKS)
        daemon.kill()
        guard.kill()
        ungranted, innocent = site.run("ungranted", "device=1"), site.run("innocent")
        waiting = site.create("waiting", "device=2")

        guard.start()
        guard.wait_ready()

        assert "pod_name=ungranted" in guard.wait_logged(WITHOUT)
        assert guard.log().count(WITHOUT) == 1
        assert guard.has_notified(", 1 container without the GPUs asked for")
        assert "pod_name=waiting" in guard.wait_logged("holds no grant: it will not start")
        wait_for("the guard's file", lambda: guard.seen()["ungranted"] == 1, 20)
        if stopping:
            site.wait_stopped(ungranted, guard)
            assert ungranted in guard.wait_logged("container stopped")
        with pytest.raises(CriError, match=REFUSED):
            site.node.cri.start(waiting)
        daemon.start()
        daemon.wait_ready()
        assert daemon.has_notified("1 container without the GPUs") is not stopping
        assert (site.state(ungranted) == "RUNNING") is not stopping
        assert [site.state(each) for each in (granted, innocent)] == ["RUNNING", "RUNNING"]


class ServiceGuard(NriGuard):
    """The guard as its unit starts it."""

    def program(self) -> list[str]:
        self.run_dir.mkdir(mode=0o755, exist_ok=True)
        self._state.mkdir(mode=0o700, exist_ok=True)
        keep = [self.launch.base, self._state, self.launch.socket.parents[1]]
        return sandbox.command(super().program(), rw=[self.run_dir], keep=keep, unit=GUARD_UNIT)


@on_newest
def test_in_the_units_sandbox(site: Site, launch: Launch) -> None:
    """The key and the policy are read, its own file is written, and gRPC works under the system call filter."""
    file = launch.base.with_name("d-guard") / "policy.toml"
    with staged(launch) as daemon:
        granted = site.create("granted", ASKS)
        daemon.kill()
    ungranted = site.run("ungranted", "device=1")
    guard = ServiceGuard(launch, file)
    file.write_text(policy(site.node))
    with guard:
        guard.wait_ready()
        site.node.cri.start(granted)
        site.refused("waiting", "device=2")
        site.wait_stopped(ungranted, guard)
        assert read_guard_status(guard.run_dir)
        assert "guard status not written" not in guard.log()


def test_a_guard_that_hangs_fails_open_and_says_so_afterwards(site: Site, launch: Launch) -> None:
    """What stays open (docs/guard.md): the runtime waits for a plugin once, and then does without it."""
    container = site.create("ungranted", ASKS)
    with NriGuard(launch) as guard:
        guard.wait_ready()
        os.kill(guard.pid, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            site.node.cri.start(container)
        finally:
            os.kill(guard.pid, signal.SIGCONT)
        assert time.monotonic() - begun > 1.9
        assert "pod_name=ungranted" in guard.wait_logged(WITHOUT)


def test_what_is_being_started_while_it_connects(runtime: packages.Runtime, folder: Path) -> None:
    """It was made while both were away. A runtime that synchronizes between such calls lists it once it runs."""
    gate = Gate(folder)
    with Containerd(runtime, runc=gate.runc) as node, ThreadPoolExecutor(1) as beside:
        site, launch = Site(node, folder), launch_on(node, folder)
        container = site.create("ungranted", ASKS)
        with NriGuard(launch, launch.with_policy(policy(node)).policy) as guard:
            with gate.shut():
                starting = beside.submit(node.cri.start, container)
                gate.wait_reached()
                guard.wait_logged("registered")
                if not runtime.synchronizes_between:
                    guard.wait_ready()
                time.sleep(LATER_S)
                assert guard.log().count("guarding") == (0 if runtime.synchronizes_between else 1)
            starting.result(20)
            wait_for("it to run", lambda: site.ran("ungranted"), 20)
            if runtime.synchronizes_between:
                assert "pod_name=ungranted" in guard.wait_logged(WITHOUT)
                site.wait_stopped(container, guard)
            else:
                time.sleep(LATER_S)
                assert (site.state(container), guard.seen()["ungranted"]) == ("RUNNING", 0)


def test_it_comes_back_when_the_runtime_does(fresh_node: Containerd, tmp_path: Path) -> None:
    site = Site(fresh_node, tmp_path)
    with NriGuard(Launch(tmp_path / "d", fresh_node.nri_socket)) as guard:
        guard.wait_ready()
        fresh_node.restart()
        wait_for("a second session", lambda: guard.log().count("guarding") == 2, 20, guard.log)
        site.refused("ungranted", ASKS)
        assert read_guard_status(guard.run_dir) is not None
    assert read_guard_status(guard.run_dir) is None
