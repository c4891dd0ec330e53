"""A container that others inject into a pod with our annotation, on real containerds: it starts without GPUs.

Past the guard, too, which knows no PodResources: over restarts of the daemon, and while that is away.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.podresources import PodResourcesServer, PodResourcesThread
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import check_opens

pytestmark = [pytest.mark.containerd, pytest.mark.short]

THEIRS: Final = "nvidia.com/gpu"
VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
FOR_NOW: Final = r"\[node-not-ready\]"


@pytest.fixture
def told(folder: Path) -> Iterator[PodResourcesServer]:
    with PodResourcesThread(folder) as server:
        yield server


@pytest.fixture
def asking(node: Containerd, launch: Launch, folder: Path) -> Launch:
    """A daemon that asks that kubelet, and injects what NVIDIA's device plugin allocates."""
    return launch.with_policy(
        f'[kubelet]\npodresources = "{folder}/pod-resources/kubelet.sock"\ncdi_dir = "{node.layout.cdi}"\n'
        'inject_for = ["nvidia.com/*"]\n'
    )


@pytest.fixture
def guarded(told: PodResourcesServer, asking: Launch) -> Iterator[NriGpu]:
    del told
    with staged(asking) as daemon, NriGuard(asking) as guard:
        guard.wait_logged("registered")
        yield daemon


def pod_of(node: Containerd, name: str, claim: str = "capabilities=compute,utility", key: str = "gpu.nri.io") -> Pod:
    return node.cri.run_pod(PodSpec(name, annotations={key: claim}))


def check_has_none(node: Containerd, container: ContainerId) -> None:
    check_opens(node, container, set(), {(195, minor) for minor in (*range(4), 255)})
    status = node.cri.status(container)
    assert status.state == "RUNNING"
    assert "mode=none" in status.oci["annotations"]["gpu.nri.io/grant"]


def test_it_starts_beside_the_container_that_has_them(
    node: Containerd, told: PodResourcesServer, guarded: NriGpu
) -> None:
    told.give("train", {"main": {THEIRS: [UUIDS[1]]}, "proxy": {}})
    pod = pod_of(node, "train")
    init = node.cri.run_persistently(pod, ContainerSpec("init"), FOR_NOW)
    check_has_none(node, init)
    node.cri.stop(init)
    main = node.cri.run_persistently(pod, ContainerSpec(env={VARIABLE: UUIDS[1]}), FOR_NOW)
    check_opens(node, main, {(195, 1), (195, 255)}, {(195, 0), (195, 2), (195, 3)})
    check_has_none(node, node.cri.run_persistently(pod, ContainerSpec("proxy"), FOR_NOW))
    guarded.wait_logged(f"{THEIRS} is for other containers of its pod")

    guarded.restart()
    debugger = node.cri.run_persistently(pod, ContainerSpec("debugger-x7f2"), FOR_NOW)
    check_has_none(node, debugger)  # an ephemeral container

    # Created while the daemon is there and started while it is away; then created while it is away.
    created = node.cri.create(pod, ContainerSpec("late"))
    guarded.terminate()
    node.cri.start(created)
    check_has_none(node, created)
    with pytest.raises(CriError, match=r"\[not-granted\]"):
        node.cri.run(pod, ContainerSpec("proxy", attempt=1))
    guarded.start()
    guarded.wait_staged()
    check_has_none(node, node.cri.run_persistently(pod, ContainerSpec("proxy", attempt=2), FOR_NOW))
