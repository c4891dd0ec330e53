"""Pods that the runtime no longer has are not counted against what is created.

After a restart containerd tells no plugin of the end of a pod that it had before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.conftest import launch_on
from tests.conformance.test_request_size import environment, labels
from tests.support.containerd import Containerd
from tests.support.cri import Pod, PodId
from tests.support.daemon import NriGpu
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd

REFUSED: Final = "list-too-large"
PASSES_S: Final = 15.0
# Pods and their bytes of annotations, with which the runtime's list is almost full; bytes of what then is too much.
OLD: Final = (6, 2_700_000, 700_000)  # NRI before 0.7: 16 MiB
NEW: Final = (2, 2_000_000, 300_000)  # one part of 4 MiB


def almost_full(node: Containerd) -> tuple[int, int, int]:
    return OLD if node.runtime.number < (2, 0) else NEW


@contextmanager
def serving(node: Containerd, folder: Path, cri_socket: Path) -> Iterator[NriGpu]:
    policy = f'schema = 1\n[plugin]\nrequest_bytes = 4194304\n[guard]\ncri_socket = "{cri_socket}"\n'
    launch = launch_on(node, folder).with_policy(policy)
    with NriGpu(launch) as daemon, NriGuard(launch, launch.policy) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        yield daemon


def leave_pods_behind(node: Containerd, daemon: NriGpu) -> None:
    """Fill the list with pods, which end after a restart of containerd."""
    count, size_bytes, _ = almost_full(node)
    for number in range(count):
        node.cri.run_pod(PodSpec(name=f"gone{number}", annotations={"filler": "x" * size_bytes}))
    node.restart()
    daemon.wait_session(2)
    for pod in node.cri.pods():
        node.cri.remove_pod(PodId(pod.id))


def large(node: Containerd, name: str = "large") -> tuple[Pod, ContainerSpec]:
    """A container that asks for nothing, in a new pod."""
    pod = node.cri.run_pod(PodSpec(name=name))
    return pod, ContainerSpec(env=environment(almost_full(node)[-1]), labels=labels(pod))


def test_after_a_restart_of_containerd_the_retry_passes(fresh_node: Containerd, tmp_path: Path) -> None:
    with serving(fresh_node, tmp_path, fresh_node.cri_socket) as daemon:
        leave_pods_behind(fresh_node, daemon)
        fresh_node.cri.run_persistently(*large(fresh_node), REFUSED, PASSES_S)
        assert daemon.log().count(REFUSED) >= 1
        assert daemon.log().count("ledger rebuilt") == 2
