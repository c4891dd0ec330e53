"""The device plugin as a kubelet meets it: lists, Allocate, hints, and what pods get of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu.domain.node import GpuFault
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from tests.support.builders import container, gpu, gpus, mig_gpu, mig_uuid, uuid
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.kubelet_nodes import GPU, KubeletNode, from_kubelet

MIXED = KubeletSettings(mig_strategy=MigStrategy.MIXED)


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Kubelet, KubeletNode]]:
    """A kubelet that has four healthy GPUs of the node's device plugin."""
    async with Kubelet(folder) as kubelet, KubeletNode(folder) as node:
        await kubelet.wait_healthy(GPU, 4)
        yield kubelet, node


async def test_the_list_follows_the_node_and_is_sent_only_on_change(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        node.controller.changed()
        node.put_gpus([gpu(0), gpu(1, unavailable="it is lost"), gpu(2), gpu(3)])
        await kubelet.wait_healthy(GPU, 3)
        node.put_gpus(gpus())
        await kubelet.wait_healthy(GPU, 4)
        node.put_gpus(gpus(3), faults=(GpuFault(3, "GPU is lost"),))
        await kubelet.wait_healthy(GPU, 3)
        assert kubelet.capacity(GPU) == 4  # ill, not removed
        node.put_gpus(gpus(6), faults=())
        await kubelet.wait_healthy(GPU, 6)
        node.put_gpus(gpus(2))
        await kubelet.wait_healthy(GPU, 2)
        assert kubelet.capacity(GPU) == 2
        assert kubelet.clients[GPU].messages == 6


async def test_numa_nodes_are_told_where_they_are_known(folder: Path) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder) as node:
        node.put_gpus([gpu(0, numa_node=0), gpu(1, numa_node=1), gpu(2)])
        await kubelet.wait("3 GPUs", lambda: kubelet.capacity(GPU) == 3)
        devices = kubelet.clients[GPU].devices
        assert [[node.ID for node in devices[uuid(index)].topology.nodes] for index in range(3)] == [[0], [1], []]
        assert not devices[uuid(2)].HasField("topology")


async def test_mig_devices_are_resources_of_their_own(folder: Path) -> None:
    small = "nvidia.com/mig-1g.5gb"
    async with Kubelet(folder) as kubelet, KubeletNode(folder, settings=MIXED) as node:
        await kubelet.wait_healthy(GPU, 4)
        node.put_gpus([gpu(0), mig_gpu(1, ["1g.5gb", "1g.5gb", "1g.10gb+me", "1c.2g.10gb"])])
        await kubelet.wait_healthy(small, 2)
        await kubelet.wait_healthy("nvidia.com/mig-1g.10gb.me", 1)
        await kubelet.wait_healthy(GPU, 1)
        assert set(kubelet.clients) == {GPU, small, "nvidia.com/mig-1g.10gb.me"}

        both = await kubelet.admit("train", "main", {GPU: 1, small: 2})
        held = node.create(from_kubelet(both))
        assert held == (uuid(0), mig_uuid(1, 0), mig_uuid(1, 1))
        node.put_gpus(gpus())
        await kubelet.wait(f"no {small}", lambda: kubelet.capacity(small) == 0)  # known, and none


async def test_what_annotations_hold_is_not_offered(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        for starts in (True, False):
            local = container("device=1", of=f"local-{starts}")
            assert node.create(local) == (uuid(1),)
            await kubelet.wait_healthy(GPU, 3)
            with pytest.raises(AdmissionError, match="got it by annotation"):  # a kubelet that had not read that yet
                await kubelet.allocate(GPU, [uuid(1)])
            if starts:
                node.start(local)
                node.stop(local)
            else:
                node.clock.now += 100  # the grace is over, and the next look is the clock's
                node.controller.changed()
            await kubelet.wait_healthy(GPU, 4)


async def test_allocate_does_not_wait_for_open_streams(folder: Path) -> None:
    async with served(folder) as (kubelet, _):
        client = kubelet.clients[GPU]
        streams = [client.stub.ListAndWatch(pb.Empty()) for _ in range(40)]
        await asyncio.gather(*(stream.read() for stream in streams))
        assert await kubelet.allocate(GPU, [uuid(0)])
        for stream in streams:
            stream.cancel()


async def test_the_answer_is_annotations_and_the_same_whatever_the_order(folder: Path) -> None:
    async with served(folder) as (kubelet, _):
        ids = [uuid(index) for index in range(4)]
        answers = set()
        for seed in range(5):
            random.Random(seed).shuffle(ids)
            answer = await kubelet.allocate(GPU, ids)
            answers.add(answer.SerializeToString(deterministic=True))
        assert len(answers) == 1
        (response,) = answer.container_responses
        # Neither environment (1), mounts (2) nor nodes (3): unknown fields would be in the bytes.
        alone = pb.ContainerAllocateResponse(annotations=response.annotations)
        assert response.ByteSize() == alone.ByteSize()
        assert list(response.annotations) == ["gpu.nri.io/kubelet.nvidia.com_gpu"]


@pytest.mark.parametrize(
    ("containers", "sentence"),
    [
        ([["GPU-nobody"]], "this node no longer has GPU-nobody of nvidia.com/gpu"),
        ([[uuid(0), uuid(0)]], "duplicate device ID"),
        ([[uuid(0)], [uuid(0)]], "duplicate device ID"),
        ([[f"GPU-{n}" for n in range(5)]], "asks for 5 of nvidia.com/gpu and this node has 4"),
        ([[uuid(0)], []], "a container asks for none"),
        ([["x\x00\u00e9" * 400]], "this node no longer has x"),
    ],
    ids=["unknown", "twice", "twice in two", "too many", "none", "hostile"],
)
async def test_what_cannot_be_is_refused_and_reserves_nothing(
    folder: Path, containers: list[list[str]], sentence: str
) -> None:
    async with served(folder) as (kubelet, node):
        with pytest.raises(AdmissionError, match=sentence) as refused:
            await kubelet.allocate(GPU, *containers)
        assert str(refused.value).isascii()
        assert len(str(refused.value)) <= 700
        assert not node.plugin.ledger.reservations


async def test_a_hint_is_never_an_error(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        stub = kubelet.clients[GPU].stub
        for available, must, size in (([], [], 3), (["GPU-x"], ["GPU-y"], 2), ([uuid(0)], [uuid(0)] * 3, -1)):
            request = pb.PreferredAllocationRequest()
            request.container_requests.add(
                available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
            )
            answer = await stub.GetPreferredAllocation(request)
            assert len(answer.container_responses) == 1
        node.put_gpus(())
        assert await kubelet.preferred(GPU, {uuid(0)}, (), 1) == {uuid(0)}


async def test_shared_gpus_have_as_many_ids_as_pods_may_share_them(folder: Path) -> None:
    shared = "nvidia.com/gpu.shared"
    settings = KubeletSettings(replicas=2, rename=True)
    async with Kubelet(folder) as kubelet, KubeletNode(folder, settings=settings) as node:
        await kubelet.wait_healthy(shared, 8)
        first = from_kubelet(await kubelet.admit("one", "main", {shared: 2}), pod="one")
        held = node.create(first)
        assert len(held) == 2  # one on each, for two of one are worth one
        second = from_kubelet(await kubelet.admit("two", "main", {shared: 6}), pod="two")
        assert len(node.create(second)) == 4
        assert "asks for mode=exclusive" in str(
            node.create(from_kubelet(first.annotations, pod="three", claim="1;mode=exclusive"))
        )
        assert "held by ml/one, ml/two" in str(node.create(container("1", of="four")))
        await kubelet.wait_healthy(shared, 8)
