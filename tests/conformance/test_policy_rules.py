"""Rules, limits and pools as a client of the runtime meets them, and what of a pod a real runtime shows to match on.

On one containerd: all of it is decided before the runtime's version matters.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import cleanup
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Cri, CriError
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = on_newest

POLICY = """
schema = 1

[environment]
may_ask = ["legacy"]

[privileged]
action = "deny"

[[rule]]
name = "no-batch"
namespace = "batch"
labels = { "example.com/urgent" = "no" }
allow = false
reason = "batch runs elsewhere"

[[rule]]
name = "no-best-effort"
qos = "besteffort"
allow = false
"""


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch) -> Launch:
    return module_launch.with_policy(POLICY)


def create(node: Containerd, value: str, pod: PodSpec, spec: ContainerSpec | None = None) -> ContainerId:
    annotations = {"gpu.nri.io": value} if value else {}
    return node.cri.run(node.cri.run_pod(replace(pod, annotations=annotations)), spec or ContainerSpec())


def refused(node: Containerd, value: str, pod: PodSpec, spec: ContainerSpec | None = None) -> CriError:
    with pytest.raises(CriError) as caught:
        create(node, value, pod, spec)
    return caught.value


def test_a_label_decides(node: Containerd, shared_daemon: NriGpu) -> None:
    error = refused(node, "1", PodSpec(namespace="batch", labels={"example.com/urgent": "no"}))
    assert error.code == "PERMISSION_DENIED"
    assert "[not-allowed]" in error.details
    assert 'rule[0] "no-batch" in' in error.details
    assert "(batch runs elsewhere)" in error.details
    create(node, "device=0", PodSpec(name="urgent", namespace="batch", labels={"example.com/urgent": "yes"}))
    shared_daemon.wait_held({"urgent/main": [UUIDS[0]]})


def test_the_environment_asks_where_it_may(node: Containerd, shared_daemon: NriGpu) -> None:
    legacy = ContainerSpec(env={"NVIDIA_VISIBLE_DEVICES": "1"})
    create(node, "", PodSpec(name="old", namespace="legacy"), legacy)
    shared_daemon.wait_held({"old/main": [UUIDS[1]]})
    create(node, "", PodSpec(name="other", namespace="modern"), legacy)
    every = ContainerSpec(env={"NVIDIA_VISIBLE_DEVICES": "all"})
    error = refused(node, "", PodSpec(name="greedy", namespace="legacy"), every)
    assert "environment.may_ask_all" in error.details
    shared_daemon.wait_held({"old/main": [UUIDS[1]]})


def test_a_privileged_container_is_denied(node: Containerd, shared_daemon: NriGpu) -> None:
    error = refused(node, "1", PodSpec(privileged=True), ContainerSpec(privileged=True))
    assert "privileged.action in the policy denies its request" in error.details
    assert shared_daemon.held() == {}


@pytest.fixture
def kubepods(node: Containerd) -> Iterator[str]:
    """The cgroup that a kubelet would make for all pods; taken away with what is in it, as a kubelet does."""
    yield f"/{node.base.name}/kubepods"
    node.cri.remove_all()
    root = Path(f"/proc/{node.supervisor_pid}/root{cleanup.CGROUPS}")
    for cgroup in cleanup.cgroups_named(node.base.name, root):
        if "kubepods" in cgroup.parts:
            cgroup.rmdir()


@pytest.mark.parametrize(("folder", "granted"), [("besteffort/pod1", False), ("burstable/pod1", True), ("pod1", True)])
def test_the_service_class_is_read_off_what_the_runtime_shows(
    node: Containerd, shared_daemon: NriGpu, kubepods: str, folder: str, granted: bool
) -> None:
    with Cri(node.cri_socket, cgroup_parent=f"{kubepods}/{folder}") as kubelet:
        pod = kubelet.asking("device=0", "p")
        if granted:
            kubelet.run(pod)
            shared_daemon.wait_held({"p/main": [UUIDS[0]]})
        else:
            with pytest.raises(CriError, match=r'rule\[1\] "no-best-effort" in'):
                kubelet.run(pod)
