"""`nri-gpu explain` says of pods with limits what the daemon does with them once a kubelet has allocated.

All pods of `test_explain`, and more that are limited to GPUs, before a daemon that is the device plugin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.cli.pod_manifest import ManifestContainer, read_pods
from tests.conformance.conftest import launch_on
from tests.conformance.test_explain import MANIFESTS, POLICY, Outcome, created, explained, sandbox
from tests.support.containerd import Containerd
from tests.support.cri import Cri, Pod
from tests.support.daemon import UUIDS, NriGpu, staged
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.marks import on_newest
from tests.support.podresources import PodResourcesServer
from tests.support.waiting import aside, in_a_loop

pytestmark = on_newest

LIMITED = sorted(MANIFESTS[0].parent.glob("kubelet/*.yaml"))
GPU: Final = "nvidia.com/gpu"


@pytest.fixture
def allocating(node: Containerd, tmp_path: Path, folder: Path) -> Iterator[NriGpu]:
    """A daemon that is the device plugin of the kubelet on `folder`."""
    sockets = f'dir = "{folder}/device-plugins"\npodresources = "{folder}/pod-resources/kubelet.sock"\n'
    policy = f'{POLICY}[kubelet]\nenabled = true\n{sockets}cdi_dir = "{node.layout.cdi}"\n'
    with staged(launch_on(node, tmp_path).with_policy(policy)) as daemon:
        yield daemon


async def persistently(
    cri: Cri, pod: Pod, listed: ManifestContainer, volume: Path, tokens: Mapping[str, str]
) -> Outcome:
    """The same as `created`, tried again while the daemon waits for PodResources."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 10
    while True:
        outcome = await aside(created, cri, pod, listed, volume, tokens)
        if outcome.code != "node-not-ready" or loop.time() > until:
            return outcome
        await asyncio.sleep(0.1)


async def admitted(kubelet: Kubelet, listing: PodResourcesServer, containers: tuple[ManifestContainer, ...]) -> str:
    """The kubelet allocates to a pod and lists it; else the code that `explain` has for what it does not admit."""
    of = containers[0].container.pod
    try:
        await kubelet.admit_pod(of.id, [(each.container.name, each.resources, each.ends) for each in containers])
    except AdmissionError:
        most = max(each.resources.get(GPU, 0) for each in containers)
        return "gpu-busy" if most <= kubelet.capacity(GPU) else "no-such-gpu"
    names = [each.container.name for each in containers if not each.ends]
    given = {name: {key: ids for key, (ids, _) in kubelet.checkpoint[of.id, name].items()} for name in names}
    listing.give(of.name, given, of.namespace)
    return ""


@pytest.mark.parametrize("manifest", [*LIMITED, *MANIFESTS], ids=lambda path: path.stem)
@in_a_loop
async def test_the_same_answer(
    node: Containerd, allocating: NriGpu, kubepods: str, folder: Path, tmp_path: Path, manifest: Path
) -> None:
    done: list[Outcome] = []
    past_kubelet: set[str] = set()  # GPUs
    pods = read_pods(await aside(manifest.read_text), manifest.name).pods
    async with Kubelet(folder) as kubelet, PodResourcesServer(folder) as listing:
        for number, containers in enumerate(pods):
            await kubelet.wait_healthy(GPU, len(UUIDS) - len(past_kubelet))
            if code := await admitted(kubelet, listing, containers):
                done += [Outcome("refuse", code)] * len(containers)
                continue
            with sandbox(node, kubepods, containers, number) as (cri, pod):
                for each in containers:
                    tokens = kubelet.replayed(each.container.pod.id, each.container.name)
                    outcome = await persistently(cri, pod, each, tmp_path, tokens)
                    done.append(outcome)
                    past_kubelet.update(outcome.gpu_uuids if not tokens and not each.ends else ())
    assert await aside(explained, allocating.launch, manifest) == done
