"""With NVIDIA's device plugin on a real containerd: what it and the kubelet allocate, and no variable by itself.

The plugin is played by what it leaves on a container, the variable that CRI brings, and by what PodResources lists.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.image import ImageSpec
from tests.support.kubelet import Kubelet
from tests.support.marks import on_newest
from tests.support.podresources import PodResourcesServer, PodResourcesThread
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, check_opens, open_numbers
from tests.support.waiting import aside, in_a_loop

pytestmark = pytest.mark.containerd

THEIRS: Final = "nvidia.com/gpu"
OURS: Final = "example.com/gpu"
VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_LIKE: Final = ImageSpec("localhost/nri-gpu/cuda-like:1", env={VARIABLE: "all"})


@pytest.fixture
def told(folder: Path) -> Iterator[PodResourcesServer]:
    with PodResourcesThread(folder) as server:
        yield server


@pytest.fixture
def serving(node: Containerd, launch: Launch, folder: Path) -> Iterator[NriGpu]:
    policy = (
        f'[kubelet]\nenabled = true\nresource = "{OURS}"\ndir = "{folder}/device-plugins"\n'
        f'podresources = "{folder}/pod-resources/kubelet.sock"\ncdi_dir = "{node.layout.cdi}"\n'
        'inject_for = ["nvidia.com/*"]\n'
    )
    with staged(launch.with_policy(policy)) as daemon:
        yield daemon


def run(node: Containerd, pod: Pod, **fields: Any) -> ContainerId:  # noqa: ANN401 - any field of its spec
    return node.cri.run_persistently(pod, ContainerSpec(**fields), r"\[node-not-ready\]")


def theirs(uuids: Sequence[str]) -> dict[str, str]:
    return {VARIABLE: ",".join(uuids)}


def check_gpus(node: Containerd, container: ContainerId, uuids: Sequence[str]) -> None:
    """It opens these GPUs, and none of the others."""
    granted = {(195, UUIDS.index(uuid)) for uuid in uuids}
    check_opens(node, container, granted | {(195, 255)} if granted else set(), {(195, minor) for minor in range(4)})
    assert not node.cri.status(container).oci.get("hooks")


@pytest.mark.short
def test_an_image_that_sets_the_variable_too(node: Containerd, told: PodResourcesServer, serving: NriGpu) -> None:
    """As every CUDA image does. The runtime puts the kubelet's behind it, and that one is read."""
    node.import_image(CUDA_LIKE)
    told.give("cuda", {"main": {THEIRS: [UUIDS[3]]}, "side": {}})
    pod = node.cri.run_pod(PodSpec(name="cuda"))
    check_gpus(node, run(node, pod, image=CUDA_LIKE.name, env=theirs([UUIDS[3]])), [UUIDS[3]])
    check_gpus(node, run(node, pod, image=CUDA_LIKE.name, name="side"), [])


def test_whom_a_dra_driver_equips_is_left_to_it(
    node: Containerd, told: PodResourcesServer, serving: NriGpu, tmp_path: Path
) -> None:
    device = tmp_path / "nvidia2"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(195, 2))
    nodes = [{"path": "/dev/nvidia2", "hostPath": str(device), "type": "c", "major": 195, "minor": 2}]
    claim = {"name": "c0ffee-gpu-2", "containerEdits": {"deviceNodes": nodes, "env": [f"{VARIABLE}=void"]}}
    spec = {"cdiVersion": "0.6.0", "kind": "k8s.gpu.nvidia.com/claim", "devices": [claim]}
    file = node.layout.cdi / "k8s.gpu.nvidia.com-claim_c0ffee.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(spec))
    try:
        told.give("dra", {"main": {}})
        pod = node.cri.run_pod(PodSpec(name="dra"))
        container = run(node, pod, cdi_devices=("k8s.gpu.nvidia.com/claim=c0ffee-gpu-2",))
    finally:
        file.unlink()
    assert open_numbers(node.cri, container, [(195, 2), (195, 1)]) == {
        (195, 2): Opened.NO_DRIVER,
        (195, 1): Opened.DENIED,
    }
    assert not [key for key in node.cri.status(container).oci["annotations"] if key.startswith("gpu.nri.io")]
    with pytest.raises(CriError, match=r"\[gpu-busy\].*default/dra \(not through nri-gpu\)"):
        run(node, node.cri.asking(f"device={UUIDS[2]}", "thief"))


@on_newest
@in_a_loop
async def test_both_plugins_side_by_side(
    node: Containerd, told: PodResourcesServer, serving: NriGpu, folder: Path
) -> None:
    async with Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(OURS, 4)
        told.give("old", {"main": {THEIRS: [UUIDS[0]]}})
        old = await aside(node.cri.run_pod, PodSpec(name="old"))
        check_gpus(node, await aside(run, node, old, env=theirs([UUIDS[0]])), [UUIDS[0]])
        await kubelet.wait_healthy(OURS, 3)

        annotations = await kubelet.admit("new", "main", {OURS: 1})
        (chosen,) = kubelet.in_use(OURS)
        assert chosen != UUIDS[0]
        told.give("new", {"main": {OURS: [chosen]}})
        new = await aside(node.cri.run_pod, PodSpec(name="new"))
        check_gpus(node, await aside(run, node, new, annotations=annotations), [chosen])

        # By annotation the rest, and nobody has what another has.
        local = await aside(node.cri.asking, "2", "local")
        rest = sorted(set(UUIDS) - {UUIDS[0], chosen})
        check_gpus(node, await aside(run, node, local), rest)
