"""The kubelet's PodResources, asked by a child: which GPUs it allocated to which pod."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from nri_gpu.stray.allocated import AllocationsUnknownError, allocated
from tests.support import builders as make
from tests.support.podresources import PodResourcesServer

GPU = "nvidia.com/gpu"


async def test_gpus_and_mig_devices_by_pod(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.give("train", {"main": {GPU: [make.uuid(0)]}, "side": {GPU: [f"{make.uuid(1)}::3"]}}, "ml")
        server.give("part", {"main": {"nvidia.com/mig-1g.5gb": [make.mig_uuid(2)], "example.com/nic": ["eth1"]}})
        server.give("nic", {"main": {"example.com/nic": ["eth0"]}})
        server.twice.add(("ml", "train"))  # the pod before it
        assert await allocated(str(server.socket)) == {
            ("ml", "train"): {make.uuid(0), make.uuid(1)},
            ("default", "part"): {make.mig_uuid(2)},
        }


@pytest.mark.parametrize("socket", ["", "/nowhere/kubelet.sock"])
async def test_a_node_without_a_kubelet_allocates_nothing(socket: str) -> None:
    assert await allocated(socket) == {}


async def test_a_kubelet_that_does_not_answer_is_not_one_that_allocates_nothing(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.fault = (grpc.StatusCode.UNAVAILABLE, "not today")
        with pytest.raises(AllocationsUnknownError, match="not today"):
            await allocated(str(server.socket))


async def test_a_socket_that_cannot_be_looked_for_may_be_there(folder: Path) -> None:
    with pytest.raises(AllocationsUnknownError):
        await allocated(str(folder / ("x" * 300)))
