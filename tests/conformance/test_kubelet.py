"""A kubelet allocates, CRI creates with what it was answered, NRI injects, and the kernel opens that alone."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.cgroup import Cgroup, DeviceRule, device_rules
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.kubelet import Kubelet
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, open_number

pytestmark = pytest.mark.containerd

GPU: Final = "nvidia.com/gpu"
UUIDS: Final = [f"GPU-{n}a100004-0000-4000-8000-00000000000{n}" for n in range(4)]
DEADLINE_S: Final = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        yield Path(made)


@pytest.fixture
def serving(node: Containerd, tmp_path: Path, folder: Path) -> Iterator[NriGpu]:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\n')
    root = make_driver_root(tmp_path / "driver")
    launch = Launch(tmp_path / "d", node.nri_socket, driver_root=root, policy=policy)
    with NriGpu(launch) as daemon:
        daemon.wait_ready()
        daemon.wait_logged("driver files staged")
        yield daemon


def run(node: Containerd, name: str, annotations: Mapping[str, str], claim: str = "") -> tuple[Pod, ContainerId]:
    pod = node.cri.run_pod(PodSpec(name=name, annotations={"gpu.nri.io": claim} if claim else {}))
    return pod, node.cri.run(pod, ContainerSpec(annotations=annotations))


def check_opens(node: Containerd, container: ContainerId, uuids: list[str]) -> None:
    """By the kernel's word: these GPUs' numbers, and of the others none."""
    minors = {UUIDS.index(uuid) for uuid in uuids}
    for minor in range(4):
        expected = Opened.NO_DRIVER if minor in minors else Opened.DENIED
        assert open_number(node.cri, container, 195, minor) is expected, minor
    if node.cgroup is Cgroup.V1:
        rules = {rule for rule in device_rules(node.container_cgroup(container)) if rule.major == 195}
        assert rules == {DeviceRule("c", 195, minor, "rw") for minor in {*minors, 255}}
    assert node.cri.status(container).env["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)


def test_the_whole_way(node: Containerd, serving: NriGpu, folder: Path) -> None:
    asyncio.run(_the_whole_way(node, serving, folder))


async def _the_whole_way(node: Containerd, serving: NriGpu, folder: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        annotations = await kubelet.admit("train", "main", {GPU: 2})
        chosen = sorted(kubelet.in_use(GPU))
        pod, container = await asyncio.to_thread(run, node, "train", annotations, "all;capabilities=compute,utility")
        check_opens(node, container, chosen)
        assert not node.cri.status(container).oci.get("hooks")
        assert len(kubelet.healthy(GPU)) == 4

        # By annotation the rest, and the kubelet hears of it.
        others = sorted(set(UUIDS) - set(chosen))
        _, local = await asyncio.to_thread(run, node, "local", {}, "2")
        check_opens(node, local, others)
        await kubelet.wait_healthy(GPU, 2)
        assert kubelet.healthy(GPU) == chosen
        with pytest.raises(CriError, match=r"\[gpu-busy\]"):
            await asyncio.to_thread(run, node, "thief", {}, f"device={chosen[0]}")

        # A restart of the daemon, and one of the container from the checkpoint.
        await asyncio.to_thread(_restart, serving)
        await kubelet.wait_healthy(GPU, 2)
        assert kubelet.healthy(GPU) == chosen
        await asyncio.to_thread(node.cri.stop, container)
        with pytest.raises(CriError, match=r"\[gpu-busy\].*default/train"):
            await asyncio.to_thread(run, node, "thief", {}, f"device={chosen[0]}")
        spec = ContainerSpec(annotations=kubelet.replayed("train", "main"), attempt=1)
        check_opens(node, await asyncio.to_thread(node.cri.run, pod, spec), chosen)

        await asyncio.to_thread(node.cri.stop_pod, pod.id)
        kubelet.remove("train")
        check_opens(node, (await asyncio.to_thread(run, node, "after", {}, f"device={chosen[0]}"))[1], chosen[:1])
        await kubelet.wait_healthy(GPU, 1)


def _restart(serving: NriGpu) -> None:
    serving.terminate()
    serving.start()
    serving.wait_ready()


def test_forged_annotations_are_refused(node: Containerd, serving: NriGpu, folder: Path) -> None:
    asyncio.run(_forged(node, folder))


async def _forged(node: Containerd, folder: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        ((key, good),) = (await kubelet.admit("train", "main", {GPU: 1})).items()
        given = next(iter(kubelet.in_use(GPU)))
        other = next(uuid for uuid in UUIDS if uuid != given)
        with pytest.raises(CriError, match=re.escape("[bad-request]: gpu.nri.io/kubelet: its mac does not match")):
            await asyncio.to_thread(run, node, "forger", {key: good.replace(given, f"{given},{other}")})
        thief = PodSpec(name="thief", annotations={key: good})
        pod = await asyncio.to_thread(node.cri.run_pod, thief)
        with pytest.raises(CriError, match="unknown annotation"):
            await asyncio.to_thread(node.cri.run, pod, ContainerSpec())
        _, container = await asyncio.to_thread(run, node, "train", {key: good})
        check_opens(node, container, [given])
