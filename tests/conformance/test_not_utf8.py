"""A string that is no UTF-8, which the runtime's NRI cannot write: its pod is named, and once it is gone both connect.

containerd 1.7 and 2.1 accept such a pod while no plugin is connected; then each Synchronize fails.
"""

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from tests.conformance.test_request_size import labels
from tests.support.containerd import Containerd
from tests.support.cri import NOT_UTF8, CriError, Pod
from tests.support.daemon import Launch, NriGpu
from tests.support.guard import NriGuard
from tests.support.marks import on_newest
from tests.support.packages import Version
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd(Version.V1_7, Version.V2_1)

GIVEN_UP: Final = "no connection survives Synchronize"
NAMED_S: Final = 60.0  # two connections of 15 s each where the runtime leaves them open, and CRI is asked
CONNECTS_S: Final = 60.0  # the longest pause between two connections, and 15 s of one that is left open
TEXTS: Final[Mapping[str, str]] = {"io.kubernetes.container.terminationMessagePath": NOT_UTF8}


def odd_pod(node: Containerd, name: str) -> Pod:
    return node.cri.run_pod(PodSpec(name=name, namespace="tenant", annotations=TEXTS))


def pod_of_odd_container(node: Containerd, name: str) -> Pod:
    pod = node.cri.run_pod(PodSpec(name=name, namespace="tenant"))
    node.cri.run(pod, ContainerSpec(annotations=TEXTS, labels=labels(pod)))
    return pod


@pytest.mark.parametrize("make", [odd_pod, pod_of_odd_container], ids=["pod", "container"])
def test_its_pod_is_named_and_once_it_is_gone_both_connect(
    node: Containerd, launch: Launch, make: Callable[[Containerd, str], Pod]
) -> None:
    asking = launch.with_policy(f'schema = 1\n[guard]\ncri_socket = "{node.cri_socket}"\n')
    node.cri.run_pod(PodSpec(name="innocent"))
    odd = make(node, "odd")
    with NriGpu(asking) as daemon, NriGuard(asking, asking.policy) as guard:
        for process in (daemon, guard):
            said = process.wait_logged(odd.id, NAMED_S)
            assert GIVEN_UP in said
            assert "tenant/odd" in said
            assert "innocent" not in said
        wait_for("status", lambda: odd.id in daemon.status()["runtime"]["fault"], 20)
        wait_for("the guard's file", lambda: odd.id in guard.seen()["fault"], 20)
        node.cri.remove_pod(odd.id)
        for process in (daemon, guard):
            process.wait_ready(CONNECTS_S)
        assert daemon.status()["runtime"]["fault"] == guard.seen()["fault"] == ""


@on_newest
def test_newer_runtimes_refuse_it(node: Containerd) -> None:
    with pytest.raises(CriError, match="string field contains invalid UTF-8"):
        odd_pod(node, "odd")
