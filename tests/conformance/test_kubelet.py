"""A kubelet allocates, CRI creates with what it was answered, NRI injects, and the kernel opens that alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from msgspec.structs import replace

from tests.conformance.conftest import launch_on
from tests.support import probe
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, Launch, NriGpu, staged
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.pods import ContainerSpec
from tests.support.scripted_runtime import until
from tests.support.waiting import aside, in_a_loop

pytestmark = pytest.mark.containerd

GPU: Final = "nvidia.com/gpu"
SOME: Final = 5


def launched(node: Containerd, base: Path, folder: Path) -> Launch:
    """With a device plugin, four simulated GPUs and a made-up driver."""
    policy = f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\ncdi_dir = "{node.layout.cdi}"\n'
    return launch_on(node, base).with_policy(policy)


@pytest.fixture
def serving(node: Containerd, tmp_path: Path, folder: Path) -> Iterator[NriGpu]:
    with staged(launched(node, tmp_path, folder)) as daemon:
        yield daemon


def run(
    node: Containerd,
    name: str,
    annotations: Mapping[str, str],
    claim: str = "",
    *,
    uid: str = "",
    attempt: int = 0,
    cdi: tuple[str, ...] = (),
) -> tuple[Pod, ContainerId]:
    """attempt: the sandbox's and the container's, of a pod that has had some. cdi: devices that Allocate answered."""
    pod = node.cri.asking(claim, name, uid=uid, attempt=attempt)
    return pod, node.cri.run(pod, ContainerSpec(annotations=annotations, attempt=attempt, cdi_devices=cdi))


def check_gpus(node: Containerd, container: ContainerId, uuids: list[str]) -> None:
    """It opens these GPUs, and none of the others."""
    numbers = {(195, minor) for minor in range(4)}
    probe.check_opens(node, container, {(195, UUIDS.index(uuid)) for uuid in uuids} | {(195, 255)}, numbers)
    assert node.cri.status(container).env["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)


@in_a_loop
@pytest.mark.short
async def test_the_whole_way(node: Containerd, serving: NriGpu, folder: Path) -> None:
    async with Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        annotations = await kubelet.admit("train", "main", {GPU: 2})
        chosen = sorted(kubelet.in_use(GPU))
        (standing,) = serving.status()["kubelet"]["resources"]
        assert (standing["resource"], standing["registered"], standing["fault"]) == (GPU, True, "")
        uid = str(uuid4())
        claim = "all;capabilities=compute,utility"
        cdi = kubelet.cdi_devices
        pod, container = await aside(run, node, "train", annotations, claim, uid=uid, cdi=cdi)
        check_gpus(node, container, chosen)
        assert not node.cri.status(container).oci.get("hooks")
        assert len(kubelet.healthy(GPU)) == 4

        # By annotation the rest, and the kubelet hears of it.
        others = sorted(set(UUIDS) - set(chosen))
        _, local = await aside(run, node, "local", {}, "2")
        check_gpus(node, local, others)
        await kubelet.wait_healthy(GPU, 2)
        assert kubelet.healthy(GPU) == chosen
        with pytest.raises(CriError, match=r"\[gpu-busy\]"):
            await aside(run, node, "thief", {}, f"device={chosen[0]}")

        # A restart of the daemon and of the kubelet, and one of the container from the checkpoint.
        await aside(serving.restart)
        await kubelet.wait_healthy(GPU, 2)
        await kubelet.restart()
        await kubelet.wait_healthy(GPU, 2)
        assert kubelet.healthy(GPU) == chosen
        await aside(node.cri.stop, container)
        with pytest.raises(CriError, match=r"\[gpu-busy\].*default/train"):
            await aside(run, node, "thief", {}, f"device={chosen[0]}")
        spec = ContainerSpec(annotations=kubelet.replayed("train", "main"), attempt=1, cdi_devices=cdi)
        check_gpus(node, await aside(node.cri.run, pod, spec), chosen)

        # Its sandbox is made anew, and it finds what the kubelet had given it.
        await aside(node.cri.stop_pod, pod.id)
        with pytest.raises(CriError, match=r"\[gpu-busy\].*default/train"):
            await aside(run, node, "thief", {}, f"device={chosen[0]}")
        replayed = kubelet.replayed("train", "main")
        pod, container = await aside(run, node, "train", replayed, uid=uid, attempt=2)
        check_gpus(node, container, chosen)

        # The pod ends, and the kubelet gives its GPUs to the next.
        await aside(node.cri.stop_pod, pod.id)
        kubelet.remove("train")
        annotations = await kubelet.admit("next", "main", {GPU: 2})
        check_gpus(node, (await aside(run, node, "next", annotations))[1], chosen)
        assert kubelet.healthy(GPU) == chosen


@in_a_loop
@pytest.mark.short
async def test_what_the_kubelet_gave_starts_only_with_us(node: Containerd, serving: NriGpu, folder: Path) -> None:
    """Neither daemon nor guard between Allocate and creation; and the same pod once the daemon is back."""
    modern = node.runtime.number >= (2, 0)
    async with Kubelet(folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        annotations = await kubelet.admit("train", "main", {GPU: 1})
        cdi, chosen = kubelet.cdi_devices, sorted(kubelet.in_use(GPU))
        assert cdi == (("gpu.nri.io/daemon=required",) if modern else ())
        said = serving.status()["kubelet"]["guard_alone"]
        assert said == ("" if modern else "the runtime speaks NRI 0.6 or older, where a reply cannot remove a mount")
        await aside(serving.kill)
        if modern:
            with pytest.raises(CriError, match="nri-gpu-is-not-running-on-this-node"):
                await aside(run, node, "train", annotations, cdi=cdi)
        await aside(serving.start)
        await aside(serving.wait_staged)
        _, container = await aside(run, node, "train", annotations, cdi=cdi, attempt=1)
        check_gpus(node, container, chosen)
        assert "nri-gpu-is-not" not in node.cri.execute(container, "cat", "/proc/self/mountinfo").stdout


@pytest.mark.parametrize("keyed_by_resource", [True, False], ids=["until 1.36", "later kubelets"])
@on_newest
@in_a_loop
async def test_a_successor_takes_over_beneath_admissions(
    node: Containerd, serving: NriGpu, folder: Path, *, keyed_by_resource: bool
) -> None:
    """Older kubelets drop the new one as the old one goes, and it registers once more."""
    failed: list[float] = []
    over = False
    loop = asyncio.get_running_loop()
    async with Kubelet(folder, keyed_by_resource=keyed_by_resource) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        first = kubelet.clients[GPU]
        annotations = await kubelet.admit("train", "main", {GPU: 1})
        cdi, chosen = kubelet.cdi_devices, sorted(kubelet.in_use(GPU))

        async def admit() -> None:
            while not over:
                try:
                    await kubelet.admit("pod", "main", {GPU: 1})
                except (AdmissionError, asyncio.CancelledError):  # in the middle of a call, too
                    failed.append(loop.time())
                kubelet.remove("pod")
                await asyncio.sleep(0.005)

        with serving.next() as successor:
            await aside(successor.wait_ready)
            assert "standing by" in str(successor.notified)
            admitting = asyncio.create_task(admit())
            await until("admissions", lambda: kubelet.allocations > SOME)
            assert await aside(serving.terminate) == 0
            await kubelet.wait("the successor", lambda: kubelet.clients[GPU] is not first)
            await kubelet.wait_healthy(GPU, 4)
            went = kubelet.allocations
            await until("more of them", lambda: kubelet.allocations > went + SOME)
            over = True
            await admitting
            assert not failed or (keyed_by_resource and failed[-1] - failed[0] < 1)
            _, container = await aside(run, node, "train", annotations, cdi=cdi)
            check_gpus(node, container, chosen)
            assert successor.terminate() == 0
    assert "another nri-gpu serves this runtime" not in successor.log()  # the one before it had left


@in_a_loop
async def test_nothing_is_healthy_while_the_runtime_is_away(
    fresh_node: Containerd, tmp_path: Path, folder: Path
) -> None:
    with NriGpu(launched(fresh_node, tmp_path, folder)) as daemon:
        await aside(daemon.wait_ready)
        async with Kubelet(folder) as kubelet:
            await kubelet.wait_healthy(GPU, 4)
            client = kubelet.clients[GPU]
            await aside(fresh_node.terminate)
            await kubelet.wait_healthy(GPU, 0)
            assert kubelet.capacity(GPU) == 4
            with pytest.raises(AdmissionError, match="not connected to the container runtime"):
                await kubelet.allocate(GPU, UUIDS[:1])
            await aside(fresh_node.restart)
            await kubelet.wait_healthy(GPU, 4)
            assert kubelet.clients[GPU] is client  # the stream went on through all of it
            _, container = await aside(run, fresh_node, "train", await kubelet.admit("train", "main", {GPU: 1}))
            check_gpus(fresh_node, container, sorted(kubelet.in_use(GPU)))
            assert await aside(daemon.terminate) == 0
            await kubelet.wait_healthy(GPU, 0)


@on_newest
@in_a_loop
async def test_nvmls_child_is_started_anew_beside_grpc(node: Containerd, tmp_path: Path, folder: Path) -> None:
    """Threads of gRPC do not survive a fork: the child comes by vfork and exec, whatever runs in the daemon."""
    gpus = tuple(FakeGpu(minor=number, uuid=each) for number, each in enumerate(UUIDS))
    launch = launched(node, tmp_path, folder)
    assert launch.driver_root
    build_fake_nvml(launch.driver_root, gpus)
    with NriGpu(replace(launch, topology=None)) as daemon:
        await aside(daemon.wait_ready)
        async with Kubelet(folder) as kubelet:
            await kubelet.wait("capacity 4", lambda: kubelet.capacity(GPU) == 4)  # unhealthy: there is no kernel module
            for _ in range(3):
                (child,) = children(daemon.pid)
                os.kill(child, signal.SIGKILL)
                daemon.hang_up()
                while children(daemon.pid) in ([], [child]):  # noqa: ASYNC110 - no event of it
                    await asyncio.sleep(0.02)
                assert await kubelet.preferred(GPU, set(UUIDS), (), 4) == set(UUIDS)
                with pytest.raises(AdmissionError, match="nvidia is not loaded"):
                    await kubelet.allocate(GPU, UUIDS[:1])
            assert (kubelet.registered, kubelet.capacity(GPU)) == (1, 4)
            assert "fork" not in daemon.log()


def children(pid: int) -> list[int]:
    """Processes that a process has started and that are not over yet."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += [int(each) for each in file.read_text().split() if alive(int(each))]
    return found


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
