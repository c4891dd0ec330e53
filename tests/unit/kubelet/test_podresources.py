"""The client of PodResources and who asks it, against a real server: kubelets that are old, slow, away or odd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import grpc
import pytest
from msgspec.structs import replace

from nri_gpu._pb import podresources_pb2 as pb
from nri_gpu.domain.allocation import (
    NVIDIA_DRIVER,
    AllocatedDevice,
    ContainerDevices,
    DynamicDevice,
    PodDevices,
)
from nri_gpu.domain.container import Container, PodId, PodUid
from nri_gpu.kubelet.podresources import Inquiry, PodResources, PodResourcesError, QuestionPace
from nri_gpu.policy.kubelet_settings import KubeletSettings
from tests.support.builders import container, pod, uuid
from tests.support.kubelet_nodes import GPU, INJECTING, ExternalNode, of_plugin, said, until
from tests.support.log import Log
from tests.support.podresources import Given, PodResourcesServer

TRAIN = PodDevices(
    "default",
    "train",
    (ContainerDevices("main", (AllocatedDevice(GPU, "a"), AllocatedDevice(GPU, "b"))), ContainerDevices("side")),
)


def told(server: PodResourcesServer) -> None:
    server.give("train", {"main": {GPU: ["a", "b"]}, "side": {}})


@asynccontextmanager
async def served(
    folder: Path, *, gets: bool = True, timeout_s: float = 5.0
) -> AsyncIterator[tuple[PodResourcesServer, PodResources]]:
    """A server that lists a pod, and a client of it."""
    async with PodResourcesServer(folder, gets=gets) as server:
        told(server)
        client = PodResources(server.socket, timeout_s=timeout_s)
        yield server, client
        await client.close()


@pytest.mark.parametrize("gets", [True, False], ids=["get", "list instead"])
async def test_one_pod_is_asked_for_by_get_or_read_off_the_list(folder: Path, gets: bool) -> None:
    async with served(folder, gets=gets) as (server, client):
        assert await client.get("default", "train") == TRAIN
        assert await client.get("default", "other") == PodDevices("default", "other")
        assert await client.get("other", "train") == PodDevices("other", "train")
    gets_asked = sum(call.startswith("Get") for call in server.asked)
    assert gets_asked == (3 if gets else 1)  # a kubelet that has none is not asked again


async def test_the_claims_of_a_pod_are_those_of_our_cdi_devices(folder: Path) -> None:
    async with served(folder) as (server, client):
        ours = ["gpu.nri.io/claim=8c5e-7d4f-0", "gpu.nri.io/claim=8c5e-7d4f-1"]
        server.claimed["default", "train"] = {"main": [*ours, "gpu.nvidia.com/claim=8c5e-0", "no name", ""]}
        main, side = (await client.get("default", "train")).containers
        assert [*main.claims, *side.claims] == ["8c5e-7d4f"]


async def test_devices_that_nvidias_driver_prepared_are_known_by_pool_and_name(folder: Path) -> None:
    async with served(folder) as (server, client):
        twice = [("node1", "gpu-3"), ("node1", "gpu-3"), ("", "x" * 70_000)]  # of two shares, once
        server.prepared["default", "train"] = {"side": twice}
        main, side = (await client.get("default", "train")).containers
        assert not main.prepared
        assert side.prepared == (DynamicDevice("node1", "gpu-3"), DynamicDevice("", "x" * 70_000))
        assert side.claims == frozenset()


async def test_our_own_devices_are_ours_under_nvidias_name_too(folder: Path) -> None:
    """The driver may be called so in policy."""
    found = pb.ClaimResource(
        cdi_devices=[pb.CDIDevice(name="gpu.nri.io/claim=8c5e-0")], driver_name=NVIDIA_DRIVER, device_name="gpu-3"
    )
    listed = pb.PodResources(namespace="default", name="train")
    listed.containers.add(name="main").dynamic_resources.add(claim_resources=[found])

    class Renamed(PodResourcesServer):
        def _pod(self, key: tuple[str, str], given: Given) -> pb.PodResources:
            del key, given
            return listed

    async with Renamed(folder) as server:
        told(server)
        client = PodResources(server.socket)
        (main,) = (await client.get("default", "train")).containers
        await client.close()
    assert not main.prepared
    assert main.claims == {"8c5e"}


async def test_a_list_beyond_grpcs_usual_limit(folder: Path) -> None:
    async with served(folder) as (server, client):
        ids = [f"GPU-{number:032x}" for number in range(120_000)]
        server.give("huge", {"main": {GPU: ids}})
        _, pod = await client.list()
        assert len(pod.devices) == len(ids)


async def test_two_pods_of_one_name_are_no_answer(folder: Path) -> None:
    async with served(folder, gets=False) as (server, client):
        server.twice.add(("default", "train"))
        with pytest.raises(PodResourcesError, match="twice"):
            await client.get("default", "train")


FAULTS = {
    "too many questions": (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"),
    "a bug of theirs": (grpc.StatusCode.INTERNAL, "bad\nthing \x07"),
    "no right": (grpc.StatusCode.PERMISSION_DENIED, "no"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_faults_are_one_sentence(folder: Path, fault: tuple[grpc.StatusCode, str]) -> None:
    async with served(folder) as (server, client):
        server.fault = fault
        for question in (client.get("default", "train"), client.list(), client.allocatable()):
            with pytest.raises(PodResourcesError, match=f"does not answer at .*: {fault[0].name}: ") as error:
                await question
            assert str(error.value).isprintable()


async def test_a_kubelet_that_is_slow_is_given_up(folder: Path) -> None:
    async with served(folder, timeout_s=0.05) as (server, client):
        server.delay_s = 5.0
        for question in (client.get("default", "train"), client.list()):
            with pytest.raises(PodResourcesError, match="DEADLINE_EXCEEDED"):
                await question


async def test_a_kubelet_that_is_away_and_comes(folder: Path) -> None:
    server = PodResourcesServer(folder)
    client = PodResources(server.socket)
    with pytest.raises(PodResourcesError, match="there is no socket"):
        await client.get("default", "train")
    told(server)
    async with server:
        assert await client.get("default", "train") == TRAIN
    with pytest.raises(PodResourcesError, match=r"no socket|does not answer"):
        await client.list()
    async with server:
        assert await client.list() == (TRAIN,)
    await client.close()


QUICK = QuestionPace(between=0.001, list_every=0.05, first=0.01, longest=0.02)


class Asking(ExternalNode):
    """With somebody who asks."""

    def __init__(
        self, server: PodResourcesServer, pace: QuestionPace = QUICK, settings: KubeletSettings = INJECTING
    ) -> None:
        super().__init__(settings)
        self.server = server
        self.pace = pace

    async def __aenter__(self) -> Self:
        client = PodResources(self.server.socket)
        inquiry = Inquiry(client, self.pods, lambda listed: self.plugin.kubelet_listed(listed), self.pace)
        self._running = asyncio.create_task(inquiry.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        (ended,) = await asyncio.gather(self._running, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)

    async def granted(self, of: Container) -> None:
        """As the kubelet does: try until it works."""
        got: list[object] = []

        def tried() -> bool:
            got.append(self.create(of))
            return not isinstance(got[-1], str)

        await until(tried)
        assert all("[node-not-ready]" in str(each) for each in got[:-1])
        assert got[-1] == (uuid(1),)


async def test_a_sandbox_is_asked_about_at_once(folder: Path) -> None:
    async with PodResourcesServer(folder) as server, Asking(server, replace(QUICK, list_every=60)) as node:
        of = of_plugin(1)
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        await until(lambda: "List" in server.asked)
        node.sandbox_created(of)
        await node.granted(of)
    assert server.asked.count("Get ml/train") == 1


async def test_a_list_tells_of_what_nobody_asked_about(folder: Path) -> None:
    async with PodResourcesServer(folder) as server, Asking(server) as node:
        server.give("slow", {"main": {GPU: [uuid(1)]}}, "ml")
        await until(lambda: bool(node.plugin.ledger.usage()))
        assert "ml/slow" in str(node.create(container("device=1", of="thief")))


async def test_many_at_once_are_one_list(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        node = Asking(server, replace(QUICK, list_every=60))
        for number in range(200):
            node.sandbox_created(pod(f"pod-{number}"))
        server.give("pod-7", {"main": {GPU: [uuid(1)]}}, "ml")
        async with node:
            await node.granted(of_plugin(1, pod="pod-7"))
    assert server.asked.count("List") <= 2
    assert len(server.asked) < 20


async def test_it_keeps_to_its_pace(folder: Path) -> None:
    """The kubelet answers 100 a second, and has others to answer."""
    async with PodResourcesServer(folder) as server, Asking(server, QuestionPace()) as node:
        began = asyncio.get_running_loop().time()
        for number in range(60):
            node.sandbox_created(pod(f"pod-{number}"))
            await asyncio.sleep(0.005)
        assert len(server.asked) <= 60 * (asyncio.get_running_loop().time() - began) + 1


async def test_faults_are_said_once_and_end_nothing(folder: Path, log: Log) -> None:
    fault = (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    async with PodResourcesServer(folder) as server:
        server.fault = fault
        async with Asking(server) as node:
            of = of_plugin(1)
            server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
            node.sandbox_created(of)
            await said(log, fault[0].name)
            await until(lambda: len(server.asked) >= 5)
            assert "[node-not-ready]" in str(node.create(of))
            server.fault = None
            await node.granted(of)
    assert fault[0].name in log.one("PodResources does not answer, trying again").fields["fault"]


async def test_a_kubelet_that_restarts(folder: Path, log: Log) -> None:
    server = PodResourcesServer(folder)
    async with Asking(server) as node:
        await said(log, "there is no socket")
        assert node.create(container("1", of="local"))[0] == uuid(0)  # there may be no kubelet
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        for number in range(3):
            async with server:
                anew = replace(pod("train"), id=PodId(f"sandbox-{number}"), uid=PodUid(f"uid-{number}"))
                of = replace(of_plugin(1), pod=anew)
                node.sandbox_created(of)
                await node.granted(of)
                assert "has not said yet" in str(node.create(container("1", of=f"local-{number}")))
            node.end_pod(of)


SERVING = KubeletSettings(enabled=True)
PATIENT = QuestionPace(between=0.001, list_every=60, first=60, longest=60)


async def test_where_there_was_no_socket_the_next_sandbox_has_it_looked_for_again(folder: Path, log: Log) -> None:
    """A node boots: the daemon is there before the kubelet, which makes old pods' containers as soon as it is up."""
    server = PodResourcesServer(folder)
    async with Asking(server, PATIENT, SERVING) as node:
        await said(log, "there is no socket")
        early, of = of_plugin(1, pod="early"), of_plugin(1)
        node.sandbox_created(early)
        await asyncio.sleep(0)
        assert node.create(early) == ()  # nobody answers, and nothing is refused
        node.end_pod(early)
        server.delay_s = 0.2
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        async with server:
            node.sandbox_created(of)
            await until(lambda: server.asked)
            assert "has not said yet" in str(node.create(of))
            await node.granted(of)
    log.one("PodResources does not answer, trying again")


async def test_a_kubelet_without_podresources_refuses_nobody(folder: Path, log: Log) -> None:
    async with PodResourcesServer(folder) as server:
        server.fault = (grpc.StatusCode.UNIMPLEMENTED, "unknown service v1.PodResourcesLister")
        async with Asking(server, settings=SERVING) as node:
            await said(log, "UNIMPLEMENTED")
            for number in range(3):
                of = of_plugin(1, pod=f"pod-{number}")
                node.sandbox_created(of)
                server.asked.clear()
                assert node.create(of) == ()
                await until(lambda: server.asked)
                assert node.create(of) == ()
    log.one("PodResources does not answer, trying again")


async def test_a_kubelet_that_hangs_is_waited_for(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.delay_s = 5.0
        async with Asking(server, settings=SERVING) as node:
            node.sandbox_created(of_plugin(1))
            await until(lambda: server.asked)
            assert "has not said yet" in str(node.create(of_plugin(1)))


async def test_a_bug_of_ours_ends_nothing(folder: Path, log: Log) -> None:
    async with PodResourcesServer(folder) as server:
        node = Asking(server)
        bugs = [ZeroDivisionError()]
        whole = node.plugin.kubelet_listed

        def once(given: object) -> None:
            if bugs:
                raise bugs.pop()
            whole(given)  # type: ignore[arg-type] # what it was given

        node.plugin.kubelet_listed = once  # type: ignore[method-assign] # that is the bug
        server.give("train", {"main": {GPU: [uuid(1)]}}, "ml")
        async with node:
            node.sandbox_created(of_plugin(1))
            await node.granted(of_plugin(1))
    assert isinstance(log.one("PodResources not read because of a bug in nri-gpu").exception, ZeroDivisionError)
