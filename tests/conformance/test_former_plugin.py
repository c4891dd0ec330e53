"""Pods of before the change-over on real containerds: their containers start of NVIDIA's device plugin's answer.

That program's answers are recorded (tests/support/former_plugin.py). The kubelet keeps them and makes each start of a
container of its pod of them, whoever serves the resource by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.former_plugin import ANSWERS, Recorded
from tests.support.guard import NriGuard
from tests.support.podresources import PodResourcesServer, PodResourcesThread
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import check_opens

pytestmark = pytest.mark.containerd

VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
FOR_NOW: Final = r"\[node-not-ready\]"
ALL: Final = {(195, minor) for minor in (*range(4), 255)}
WHOLE: Final = {name: each for name, each in ANSWERS.items() if each.resource == "nvidia.com/gpu"}


@pytest.fixture
def told(folder: Path) -> Iterator[PodResourcesServer]:
    with PodResourcesThread(folder) as server:
        yield server


@pytest.fixture
def taking_over(node: Containerd, launch: Launch, folder: Path) -> Launch:
    """A daemon that serves the resource."""
    return launch.with_policy(
        f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\ncdi_dir = "{node.layout.cdi}"\n'
        f'podresources = "{folder}/pod-resources/kubelet.sock"\n'
    )


@pytest.fixture
def serving(told: PodResourcesServer, taking_over: Launch) -> Iterator[NriGpu]:
    del told
    with staged(taking_over) as daemon, NriGuard(taking_over) as guard:
        guard.wait_logged("registered")
        yield daemon


def run(
    node: Containerd, told: PodResourcesServer, recorded: Recorded, spec: ContainerSpec | None = None
) -> ContainerId:
    """A start of the container of an old pod, as often as the kubelet tries."""
    told.give("train", {"main": {recorded.resource: recorded.ids}})
    pod = node.cri.run_pod(PodSpec(name="train"))
    return node.cri.run_persistently(pod, spec or recorded.spec(), FOR_NOW)


def check_has(node: Containerd, container: ContainerId, recorded: Recorded) -> None:
    """It opens the GPUs that the kubelet allocated, by a grant, and no others."""
    uuids = {id_.partition("::")[0] for id_ in recorded.ids}
    granted = {(195, UUIDS.index(uuid)) for uuid in uuids} | {(195, 255)}
    check_opens(node, container, granted, ALL - granted)
    status = node.cri.status(container)
    assert set(status.env[VARIABLE].split(",")) == uuids
    mode = "shared" if "::" in recorded.ids[0] else "exclusive"
    assert f"mode={mode}" in status.oci["annotations"]["gpu.nri.io/grant"]


BY_VARIABLE: Final = [name for name, each in WHOLE.items() if not each.answer.annotations and each.answer.envs]


@pytest.mark.parametrize("strategy", [name for name in BY_VARIABLE if "PASS" not in name])
def test_it_starts_with_the_gpus_that_the_kubelet_lists(
    node: Containerd, told: PodResourcesServer, serving: NriGpu, strategy: str
) -> None:
    del serving
    check_has(node, run(node, told, WHOLE[strategy]), WHOLE[strategy])


@pytest.mark.short
def test_over_restarts_of_container_and_daemon(node: Containerd, told: PodResourcesServer, serving: NriGpu) -> None:
    recorded = WHOLE["envvar by index"]
    told.give("train", {"main": {recorded.resource: recorded.ids}})
    pod = node.cri.run_pod(PodSpec(name="train"))
    container = node.cri.run_persistently(pod, recorded.spec(), FOR_NOW)
    serving.restart()
    node.cri.stop(container)
    again = node.cri.run_persistently(pod, recorded.spec(attempt=50), FOR_NOW)
    check_has(node, again, recorded)
    with pytest.raises(CriError, match=r"\[gpu-busy\].*default/train"):
        node.cri.run_persistently(node.cri.asking(f"device={UUIDS[1]}", "thief"), ContainerSpec(), FOR_NOW)

    serving.terminate()  # and nobody is there to inject
    node.cri.stop(again)
    with pytest.raises(CriError, match=r"\[not-granted\]"):
        node.cri.run(pod, recorded.spec(attempt=100))
    serving.start()
    serving.wait_staged()
    check_has(node, node.cri.run_persistently(pod, recorded.spec(attempt=150), FOR_NOW), recorded)


@pytest.mark.parametrize("strategy", [name for name in WHOLE if name.startswith("cdi-")])
def test_whose_cdi_file_is_gone_the_runtime_refuses(
    node: Containerd, told: PodResourcesServer, serving: NriGpu, strategy: str
) -> None:
    """Before any plugin sees it: such a pod has to be made anew."""
    del serving
    with pytest.raises(CriError, match=r"unresolvable CDI devices|CDI device injection failed"):
        run(node, told, WHOLE[strategy])
