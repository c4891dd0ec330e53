"""The client of PodResources against a real server: answers, limits, kubelets that are old, slow, away or odd."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from nri_gpu.domain.kubelet import AllocatedDevice, ContainerDevices, PodDevices
from nri_gpu.kubelet.podresources import PodResources, PodResourcesError
from tests.support.podresources import PodResourcesServer

GPU = "nvidia.com/gpu"
TRAIN = PodDevices(
    "default",
    "train",
    (ContainerDevices("main", (AllocatedDevice(GPU, "a"), AllocatedDevice(GPU, "b"))), ContainerDevices("side")),
)


def told(server: PodResourcesServer) -> None:
    server.give("train", {"main": {GPU: ["a", "b"]}, "side": {}})


@pytest.mark.parametrize("gets", [True, False], ids=["get", "list instead"])
async def test_one_pod(folder: Path, gets: bool) -> None:
    async with PodResourcesServer(folder, gets=gets) as server:
        told(server)
        client = PodResources(server.socket)
        assert await client.get("default", "train") == TRAIN
        assert await client.get("default", "other") == PodDevices("default", "other")
        assert await client.get("other", "train") == PodDevices("other", "train")
        await client.close()
    gets_asked = sum(call.startswith("Get") for call in server.asked)
    assert gets_asked == (3 if gets else 1)  # a kubelet that has none is not asked again


async def test_all_pods_and_what_can_be_given(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        told(server)
        client = PodResources(server.socket)
        assert await client.list() == (TRAIN,)
        assert await client.allocatable() == {GPU: ("a", "b")}
        await client.close()


async def test_a_list_beyond_grpcs_usual_limit(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        ids = [f"GPU-{number:032x}" for number in range(120_000)]
        server.give("huge", {"main": {GPU: ids}})
        client = PodResources(server.socket)
        (pod,) = await client.list()
        assert len(pod.devices) == len(ids)
        await client.close()


async def test_two_pods_of_one_name_are_no_answer(folder: Path) -> None:
    async with PodResourcesServer(folder, gets=False) as server:
        told(server)
        server.twice.add(("default", "train"))
        client = PodResources(server.socket)
        with pytest.raises(PodResourcesError, match="twice"):
            await client.get("default", "train")
        await client.close()


FAULTS = {
    "too many questions": (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"),
    "a bug of theirs": (grpc.StatusCode.INTERNAL, "bad\nthing \x07"),
    "no right": (grpc.StatusCode.PERMISSION_DENIED, "no"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_faults_are_one_sentence(folder: Path, fault: tuple[grpc.StatusCode, str]) -> None:
    async with PodResourcesServer(folder) as server:
        server.fault = fault
        client = PodResources(server.socket)
        for question in (client.get("default", "train"), client.list(), client.allocatable()):
            with pytest.raises(PodResourcesError, match=f"does not answer at .*: {fault[0].name}: ") as error:
                await question
            assert str(error.value).isprintable()
        await client.close()


async def test_deadlines(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.delay_s = 5.0
        client = PodResources(server.socket, timeout_s=0.05)
        for question in (client.get("default", "train"), client.list()):
            with pytest.raises(PodResourcesError, match="DEADLINE_EXCEEDED"):
                await question
        await client.close()


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
