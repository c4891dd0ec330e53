"""The stream by which the kubelet learns how devices are, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from nri_gpu._pb import drahealth_pb2 as pb
from nri_gpu.dra.device_health import SERVICES, DeviceHealthService
from nri_gpu.dra.offered_devices import HELD
from nri_gpu.dra.questions import NodeView, OfferedDevice, Taint

ILL = "GPU is lost"


def view(fault: str = "", *taints: Taint, known: bool = True) -> NodeView:
    device = OfferedDevice(name="gpu-0", attributes={}, capacity={}, taints=taints, fault=fault)
    return NodeView(number=1, driver="", dir="", registry_dir="", cdi_dir="", known=known, devices=(device,))


Stream = AsyncIterator[pb.NodeWatchResourcesResponse]


@asynccontextmanager
async def watched(service: DeviceHealthService, folder: Path) -> AsyncIterator[Stream]:
    """A stream of the service, as the kubelet opens it."""
    server, path = grpc.aio.server(), f"unix:{folder}/dra.sock"
    server.add_generic_rpc_handlers(service.handlers())
    server.add_insecure_port(path)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(path) as channel:
            call = channel.unary_stream(
                f"/{SERVICES[0]}/NodeWatchResources",
                request_serializer=pb.NodeWatchResourcesRequest.SerializeToString,
                response_deserializer=pb.NodeWatchResourcesResponse.FromString,
            )(pb.NodeWatchResourcesRequest(), timeout=20)
            yield aiter(call)
    finally:
        await server.stop(None)


async def test_each_change_of_health_is_told_at_once(tmp_path: Path) -> None:
    service = DeviceHealthService("node1", again_s=60)
    service.put(view("", Taint(HELD, "container", "NoSchedule")))  # a GPU that others hold is well
    async with watched(service, tmp_path) as stream:
        (well,) = (await anext(stream)).devices
        assert (well.device.pool_name, well.device.device_name) == ("node1", "gpu-0")
        assert well.health == pb.HEALTHY
        assert well.last_updated_time > 0
        service.put(view(ILL))
        (ill,) = (await anext(stream)).devices
        assert (ill.health, ill.message) == (pb.UNHEALTHY, "GPU is lost")


async def test_a_reason_is_told_in_ascii_and_in_the_bytes_that_a_pods_status_has(tmp_path: Path) -> None:
    service = DeviceHealthService("node1", again_s=60)
    service.put(view("Ü" * 5000))
    async with watched(service, tmp_path) as stream:
        (ill,) = (await anext(stream)).devices
    assert ill.message.isascii()
    assert 900 < len(ill.message) <= 1024  # kubernetes: core/v1, ResourceHealthMessageMaxLength


async def test_what_stays_is_told_again_before_the_kubelet_forgets_it(tmp_path: Path) -> None:
    service = DeviceHealthService("node1", again_s=0.01)
    service.put(view(ILL))
    async with watched(service, tmp_path) as stream:
        told = [(await anext(stream)).devices[0].health for _ in range(3)]
    assert told == [pb.UNHEALTHY] * 3


async def test_devices_that_the_daemon_does_not_know_yet_are_not_told(tmp_path: Path) -> None:
    service = DeviceHealthService("node1", again_s=60)
    service.put(view(known=False))
    async with watched(service, tmp_path) as stream:
        assert not (await anext(stream)).devices
