"""A scheduler allocates, a kubelet prepares, CRI creates with CDI names, NRI injects, the kernel opens that alone."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from msgspec import Struct

from tests.conformance.conftest import launch_on
from tests.support import dra_process, probe
from tests.support.api_server import StandInApiServer
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import UUIDS, NriGpu
from tests.support.dra_kubelet import DraKubelet
from tests.support.dra_process import NriDra
from tests.support.guard import NriGuard
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.resource_claims import DRIVER, NODE, resource_claim, result
from tests.support.waiting import aside, in_a_loop, wait_for

pytestmark = pytest.mark.containerd

CONTROL: Final = (195, 255)
MINORS: Final = {(195, minor) for minor in range(4)}
UNSTARTED: Final = "nri-gpu-is-not-running-on-this-node"


class Site(Struct, frozen=True):
    """A node with everything that serves claims on it."""

    node: Containerd
    server: StandInApiServer
    kubelet: DraKubelet
    daemon: NriGpu
    dra: NriDra

    def claim(self, name: str, *devices: str, pod: str, requests: Sequence[str] = ()) -> Named:
        """The scheduler's work: an allocated claim for a pod. requests: of each device."""
        uid = str(uuid4())
        named = zip(devices, requests or ["gpu"] * len(devices), strict=True)
        results = [result(device, request, pool=NODE, shareID=str(uuid4())) for device, request in named]
        self.server.claims["ml", name] = resource_claim(*results, uid=uid, name=name, pods={pod: "web"})
        return "ml", name, uid

    async def prepare(self, claim: Named, request: str = "") -> tuple[str, ...]:
        """The CDI names that a container with that request gets; without one, those of the whole claim."""
        devices = (await self.kubelet.prepare(DRIVER, claim))[claim[2]]
        return tuple(name for each in devices if request in ("", *each.request_names) for name in each.cdi_device_ids)

    async def pod(self, name: str, uid: str, attempt: int = 0) -> Pod:
        return await aside(self.node.cri.run_pod, PodSpec(name=name, namespace="ml", uid=uid, attempt=attempt))

    async def run(self, pod: Pod, name: str, cdi: Sequence[str] = (), attempt: int = 0) -> ContainerId:
        spec = ContainerSpec(name=name, cdi_devices=cdi, attempt=attempt)
        return await aside(self.node.cri.run, pod, spec)

    def check(self, container: ContainerId, *minors: int) -> None:
        """It opens these GPUs and no others, and nothing of how that came to be is left in it."""
        granted = {(195, minor) for minor in minors} | ({CONTROL} if minors else set())
        probe.check_opens(self.node, container, granted, MINORS)
        status = self.node.cri.status(container)
        assert not status.oci.get("hooks")
        assert UNSTARTED not in str(status.oci["mounts"])

    def files(self) -> list[str]:
        return sorted(each.name for each in self.node.layout.cdi.glob("*claim*"))


Named = tuple[str, str, str]


@asynccontextmanager
async def site_on(node: Containerd, base: Path, folder: Path, policy: str = "") -> AsyncIterator[Site]:
    """policy: what it says beside how claims are served."""
    launch = launch_on(node, base).with_policy(policy + dra_process.policy(folder, node.layout.cdi))
    for left in node.layout.cdi.glob("nri-gpu-claim-*"):  # by a test that unprepared nothing
        left.unlink()
    with StandInApiServer() as server, NriGpu(launch) as daemon:
        server.add_node(NODE)
        daemon.wait_staged()
        async with DraKubelet(folder) as kubelet:
            with NriDra(launch, server) as dra:
                await aside(dra.wait_ready)
                await kubelet.wait_for_driver(DRIVER)
                await aside(wait_for, "slices", lambda: len(server.devices()) == 4, 20, dra.log)
                yield Site(node, server, kubelet, daemon, dra)


@in_a_loop
@pytest.mark.short
async def test_the_whole_way(node: Containerd, tmp_path: Path, folder: Path) -> None:
    uid = str(uuid4())
    async with site_on(node, tmp_path, folder) as site:
        assert sorted(site.server.devices()) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
        claim = site.claim("train", "gpu-1", "gpu-3", pod=uid, requests=("one", "other"))
        whole, one = await site.prepare(claim), await site.prepare(claim, "one")
        assert site.files() == [f"nri-gpu-claim-{claim[2]}.json"]
        # Held before any container has it, also from those who ask by annotation.
        with pytest.raises(CriError, match=r"\[gpu-busy\].*claim ml/train"):
            await aside(node.cri.run_asking, "device=3", "thief")
        pod = await site.pod("web", uid)
        main = await site.run(pod, "main", one)
        site.check(main, 1)
        site.check(await site.run(pod, "both", whole), 1, 3)
        site.check(await site.run(pod, "none"))
        second = site.claim("more", "gpu-0", pod=uid)
        more = await site.prepare(second)
        # The kubelet names a device again for each time that it was prepared.
        site.check(await site.run(pod, "two-claims", (*one, *more, *one)), 0, 1)
        with pytest.raises(CriError, match=r"\[gpu-busy\].*ml/web"):
            await aside(node.cri.run_asking, "device=3", "thief")
        assert "ml/train" in site.daemon.verb("status").stdout

        # Everything is restarted, one after the other, and the container finds its GPU again.
        await aside(site.daemon.restart)
        site.dra.hang_up()  # nothing: it reads no file
        await aside(site.dra.kill)
        await aside(site.dra.start)
        await aside(site.dra.wait_ready)
        await site.kubelet.restart()
        await site.kubelet.wait_for_driver(DRIVER)
        assert await site.prepare(claim) == whole
        await aside(node.cri.stop, main)
        site.check(await site.run(pod, "main", one, attempt=1), 1)

        # The pod ends, and nothing is left.
        await aside(node.cri.remove_pod, pod.id)
        del site.server.claims["ml", "train"]
        await site.kubelet.unprepare(DRIVER, claim, second)
        assert site.files() == []
        site.check(await aside(node.cri.run_asking, "device=0,1,3", "next"), 0, 1, 3)
        assert await aside(site.dra.terminate) == 0
        assert not [*site.kubelet.registry.iterdir(), *site.kubelet.plugins.glob("*/*.sock")]


@in_a_loop
@pytest.mark.short
async def test_a_container_with_a_claim_starts_only_with_us(node: Containerd, tmp_path: Path, folder: Path) -> None:
    """Neither daemon nor guard: nothing but the mount keeps it from starting, which 1.7 leaves to the guard."""
    uid = str(uuid4())
    async with site_on(node, tmp_path, folder) as site:
        cdi = await site.prepare(site.claim("train", "gpu-2", pod=uid))
        pod = await site.pod("web", uid)
        await aside(site.daemon.kill)
        await aside(site.dra.terminate)
        if node.runtime.number >= (2, 0):
            if node.runtime.validates:  # whoever comes first after the daemon's end is refused by that, or by the mount
                with suppress(CriError):
                    await aside(node.cri.run_asking, "none", "bystander")
            with pytest.raises(CriError, match=UNSTARTED):
                await site.run(pod, "main", cdi)
        else:
            with NriGuard(site.daemon.launch) as guard:
                await aside(guard.wait_ready)
                with pytest.raises(CriError, match=r"\[not-granted\]"):
                    await site.run(pod, "main", cdi)
        await aside(site.daemon.start)
        await aside(site.daemon.wait_staged)
        site.check(await site.run(pod, "main", cdi, attempt=1), 2)


@on_newest
@in_a_loop
async def test_a_hundred_pods_of_one_gpu_go_through_four_and_leave_nothing(
    node: Containerd, tmp_path: Path, folder: Path
) -> None:
    """A scheduler gives a device to the next pod once its claim is gone; the kubelet unprepares before that."""
    async with site_on(node, tmp_path, folder) as site:
        free: asyncio.Queue[str] = asyncio.Queue()
        for device in site.server.devices():
            free.put_nowait(device)
        granted: Counter[str] = Counter()

        async def live(number: int) -> None:
            device, uid = await free.get(), str(uuid4())
            claim = site.claim(f"claim-{number}", device, pod=uid)
            prepared = await site.prepare(claim)
            # The sandbox comes after, as with a kubelet: the runtime takes a moment to read a new specification.
            pod = await site.pod(f"pod-{number}", uid)
            container = await site.run(pod, "main", prepared)
            env = (await aside(node.cri.status, container)).env
            assert env["NVIDIA_VISIBLE_DEVICES"] == UUIDS[int(device[-1])]
            granted[device] += 1
            await aside(node.cri.remove_pod, pod.id)
            await site.kubelet.unprepare(DRIVER, claim)
            del site.server.claims[claim[:2]]
            free.put_nowait(device)

        async with asyncio.TaskGroup() as pods:
            for number in range(100):
                pods.create_task(live(number))
        assert granted.total() == 100
        assert min(granted.values()) > 10
        assert site.files() == []
        assert site.daemon.status()["claims"] == []
        elapsed_ms = sorted(map(float, re.findall(r"ResourceClaim prepared .*elapsed_ms=([0-9.]+)", site.dra.log())))
        assert len(elapsed_ms) == 100
        assert elapsed_ms[95] < 1000
        site.check(await aside(node.cri.run_asking, "device=0,1,2,3", "next"), 0, 1, 2, 3)
