"""From another device plugin of the same resource to ours and back, with pods running: no GPU counts twice.

NVIDIA's device plugin is served by no registry. Its part is what PodResources and the kubelet's checkpoint keep of it,
and the nodes that its answer gave to containers by CDI (deviceListStrategy=cdi-cri).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.conftest import launch_on
from tests.conformance.test_kubelet import check_gpus, run
from tests.support.cdi import opening
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.kubelet import Kubelet, Rival
from tests.support.packages import Version, available
from tests.support.podresources import PodResourcesServer
from tests.support.pods import ContainerSpec
from tests.support.waiting import aside, in_a_loop

pytestmark = pytest.mark.containerd(Version.V2_1, available()[-1])

GPU: Final = "nvidia.com/gpu"
KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
OLD: Final = UUIDS[:2]  # of the pod that was there before
GOES_S: Final = 30.0  # until PodResources was asked twice more


@contextmanager
def earlier_pod(node: Containerd, folder: Path) -> Iterator[tuple[Pod, ContainerId]]:
    """A pod that another device plugin gave two GPUs, before any daemon of ours."""
    file = node.layout.cdi / "k8s.device-plugin.nvidia.com-gpu.json"
    devices = {uuid: [number, 255] for number, uuid in enumerate(UUIDS)}
    with opening(file, folder, KIND, devices):
        pod = node.cri.asking("", "old")
        yield pod, node.cri.run(pod, ContainerSpec(cdi_devices=tuple(f"{KIND}={uuid}" for uuid in OLD)))


def policy(node: Containerd, folder: Path, more: str = "") -> str:
    sockets = f'dir = "{folder}/device-plugins"\npodresources = "{folder}/pod-resources/kubelet.sock"\n'
    return f'[kubelet]\n{sockets}cdi_dir = "{node.layout.cdi}"\n{more}'


def launched(node: Containerd, base: Path, folder: Path) -> Launch:
    """With our device plugin."""
    return launch_on(node, base).with_policy(policy(node, folder, "enabled = true\n"))


def reserved(daemon: NriGpu) -> list[str]:
    """GPUs that are reserved for a pod of which no container has them."""
    return [each["uuid"] for each in daemon.status()["gpus"] if any(holder["reserved"] for holder in each["holders"])]


@in_a_loop
async def test_the_way_over(node: Containerd, tmp_path: Path, folder: Path) -> None:
    with earlier_pod(node, tmp_path) as (pod, container):
        async with Kubelet(folder) as kubelet, PodResourcesServer(folder) as listing:
            kubelet.checkpoint["old", "main"] = {GPU: (tuple(OLD), {})}
            with staged(launched(node, tmp_path, folder)):
                # Until the kubelet says whose they are, they are another component's.
                await kubelet.wait_healthy(GPU, 2)
                listing.give("old", {"main": {GPU: OLD}})
                await kubelet.wait("the List after that", lambda: len(kubelet.healthy(GPU)) == 4, GOES_S)

                # Of the 4 that are allocatable the kubelet counts 2 as the old pod's, and 2 are free.
                annotations = await kubelet.admit("new", "main", {GPU: 2})
                check_gpus(node, (await aside(run, node, "new", annotations))[1], sorted(set(UUIDS) - set(OLD)))
                assert len(kubelet.healthy(GPU)) == 4

                # The old pod ends, and its GPUs are the next pod's at once.
                await aside(node.cri.stop, container)
                await aside(node.cri.stop_pod, pod.id)
                kubelet.remove("old")
                listing.pods.clear()
                annotations = await kubelet.admit("next", "main", {GPU: 2})
                check_gpus(node, (await aside(run, node, "next", annotations))[1], OLD)
                assert len(kubelet.healthy(GPU)) == 4


@in_a_loop
async def test_the_way_back(node: Containerd, tmp_path: Path, folder: Path) -> None:
    """The kubelet keeps what we allocated; another plugin allocates the rest, and nothing of ours is in its way."""
    with staged(launched(node, tmp_path, folder)) as daemon:
        async with Kubelet(folder) as kubelet, PodResourcesServer(folder) as listing:
            await kubelet.wait_healthy(GPU, 4)
            given = {}
            for name in ("stays", "over"):
                given[name] = await kubelet.admit(name, "main", {GPU: 1})
                listing.give(name, {"main": {GPU: kubelet.checkpoint[name, "main"][GPU][0]}})
            _, stays = await aside(run, node, "stays", given["stays"])
            pod, over = await aside(run, node, "over", given["over"])
            await aside(node.cri.stop, over)
            assert reserved(daemon) == list(kubelet.checkpoint["over", "main"][GPU][0])
            (kept,) = kubelet.checkpoint["stays", "main"][GPU][0]

            # The same folders, and a policy that no longer names the resource: `over` is crashing at that time.
            assert await aside(daemon.terminate) == 0
            daemon.launch.with_policy(policy(node, folder))
            await aside(daemon.start)
            await aside(daemon.wait_staged)
            assert reserved(daemon) == []
            check_gpus(node, stays, [kept])
            rest = [uuid for uuid in UUIDS if uuid != kept]
            _, local = await aside(run, node, "local", {}, "3")
            check_gpus(node, local, rest)
            await aside(node.cri.stop_pod, pod.id)


@in_a_loop
async def test_the_way_back_where_we_inject_for_the_other_plugin(
    node: Containerd, tmp_path: Path, folder: Path
) -> None:
    """A container of our pod starts again with our answer, which the kubelet keeps; a new pod has the other's."""
    with staged(launched(node, tmp_path, folder)) as daemon:
        async with Kubelet(folder) as kubelet, PodResourcesServer(folder) as listing:
            await kubelet.wait_healthy(GPU, 4)
            annotations = await kubelet.admit("stays", "main", {GPU: 1})
            (kept,) = kubelet.checkpoint["stays", "main"][GPU][0]
            cdi = kubelet.cdi_devices
            listing.give("stays", {"main": {GPU: [kept]}})
            pod, container = await aside(run, node, "stays", annotations, cdi=cdi)
            assert await aside(daemon.terminate) == 0
            daemon.launch.with_policy(policy(node, folder, f'inject_for = ["{GPU}"]\n'))
            await aside(daemon.start)
            await aside(daemon.wait_staged)
            async with Rival(kubelet.dir, GPU, UUIDS) as theirs:
                await theirs.register()
                await kubelet.wait_healthy(GPU, 4)
                await aside(node.cri.stop, container)
                spec = ContainerSpec(annotations=kubelet.replayed("stays", "main"), attempt=1, cdi_devices=cdi)
                again = await aside(node.cri.run_persistently, pod, spec, "bad-request", GOES_S)
                check_gpus(node, again, [kept])

                (other, *_) = [uuid for uuid in UUIDS if uuid != kept]
                listing.give("new", {"main": {GPU: [other]}})
                new = await aside(node.cri.asking, "", "new")
                spec = ContainerSpec(env={"NVIDIA_VISIBLE_DEVICES": other})
                made = await aside(node.cri.run_persistently, new, spec, "node-not-ready", GOES_S)
                check_gpus(node, made, [other])
