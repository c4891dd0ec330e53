"""The plugin hangs or dies in the middle of a create: the runtime goes on without it, and nothing runs ungranted."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.unread import unread_bytes
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

REQUEST_TIMEOUT_S = 3.0
UUID = UUIDS[0]


@pytest.fixture(scope="module")
def hasty(runtime: packages.Runtime) -> Iterator[Containerd]:
    """A containerd whose request timeout is known."""
    with Containerd(runtime, request_timeout_s=REQUEST_TIMEOUT_S) as node:
        yield node


@pytest.fixture
def node(hasty: Containerd) -> Iterator[Containerd]:
    yield hasty
    hasty.cri.remove_all()


@pytest.fixture
def serving(node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    with staged(launch_on(node, tmp_path)) as daemon:
        yield daemon
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Where a create goes on while the test looks at it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def asking(node: Containerd, name: str) -> Pod:
    return node.cri.asking("device=0", name)


def held_up(node: Containerd, daemon: NriGpu, pool: ThreadPoolExecutor) -> Future[ContainerId]:
    """A create whose request lies unread before a stopped plugin."""
    pod = asking(node, "victim")
    os.kill(daemon.pid, signal.SIGSTOP)
    creating = pool.submit(node.cri.create, pod, ContainerSpec())
    wait_for("the request to reach the plugin", lambda: unread_bytes(daemon.pid) > 0, 20)
    return creating


def left_alone(node: Containerd, creating: Future[ContainerId]) -> ContainerId | None:
    """The container that the runtime made without us, or None where it validates and so failed to make it."""
    if not node.runtime.validates:
        return creating.result()
    with pytest.raises(CriError, match="validator plugin 10-nri-gpu failed"):
        creating.result()
    return None


def test_stopped_during_a_create(node: Containerd, serving: NriGpu, aside: ThreadPoolExecutor) -> None:
    begun = time.monotonic()
    ungranted = left_alone(node, held_up(node, serving, aside))
    assert time.monotonic() - begun >= REQUEST_TIMEOUT_S  # it waits, and then goes on without us
    bystander = node.cri.run(node.cri.run_pod(PodSpec(name="bystander")))

    os.kill(serving.pid, signal.SIGCONT)
    serving.wait_session(2)

    serving.wait_held({})  # what it decided after waking up was never heard
    assert node.cri.status(bystander).state == "RUNNING"
    if ungranted:
        assert node.cri.status(ungranted).device_paths == []
        with pytest.raises(CriError, match=r"\[not-granted\].*create it again"):
            node.cri.start(ungranted)
        serving.wait_logged("created without nri-gpu")
    node.cri.run(asking(node, "next"))
    serving.wait_held({"next/main": [UUID]})


@pytest.fixture
def behind(node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    """A plugin that the runtime asks after ours: while it is stopped, a create hangs whose answer from us was read."""
    launch = Launch(tmp_path / "behind", node.nri_socket, index="90")
    with NriGpu(launch.with_policy('[namespaces]\nallow = ["nobody"]\notherwise = "ignore"\n')) as daemon:
        daemon.wait_ready()
        yield daemon
        os.kill(daemon.pid, signal.SIGCONT)


def test_containerd_stopped_behind_our_answer(
    node: Containerd, serving: NriGpu, behind: NriGpu, aside: ThreadPoolExecutor
) -> None:
    """For longer than it waits for plugins, while a new daemon knows of the grant by its journal alone."""
    first, second = asking(node, "first"), asking(node, "second")
    os.kill(behind.pid, signal.SIGSTOP)
    creating = aside.submit(node.cri.create, first, ContainerSpec())
    wait_for("our answer to be read", lambda: unread_bytes(behind.pid) > 0, 20)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        serving.kill()
        serving.start()
        time.sleep(REQUEST_TIMEOUT_S + 1)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    serving.wait_staged()
    running = [started(node, lambda: node.cri.create(second, ContainerSpec()))]
    running.append(started(node, creating.result))
    # One that validates does not make the first without the plugin that hangs, and its GPU waits for the pod's end.
    assert running.count(True) == (0 if node.runtime.validates else 1)
    serving.wait_grants(1)
    node.cri.remove_all()
    wait_for("the GPU", lambda: started(node, lambda: node.cri.create(asking(node, "next"), ContainerSpec())), 20)


def started(node: Containerd, create: Callable[[], ContainerId]) -> bool:
    """Whether that container could be created and started; else it was refused."""
    try:
        node.cri.start(create())
    except CriError as error:
        assert re.search(r"\[gpu-busy\]|validator plugin \d\d-nri-gpu failed", error.details)
        return False
    return True


@pytest.mark.short
def test_killed_during_a_create(node: Containerd, serving: NriGpu, aside: ThreadPoolExecutor) -> None:
    creating = held_up(node, serving, aside)
    begun = time.monotonic()
    serving.kill()
    ungranted = left_alone(node, creating)
    assert time.monotonic() - begun < REQUEST_TIMEOUT_S / 2  # a closed connection is seen at once
    bystander = node.cri.create(node.cri.run_pod(PodSpec(name="bystander")))

    serving.start()
    serving.wait_ready()

    if ungranted:
        with pytest.raises(CriError, match=r"\[not-granted\].*create it again"):
            node.cri.start(ungranted)
    node.cri.start(bystander)
    serving.wait_held({})
