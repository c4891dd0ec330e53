"""The health of the published devices, told to the kubelet, so that pods show it in `allocatedResourcesStatus`.

The kubelet (gate ResourceHealthStatus, on from 1.36) asks each driver by v1alpha1, whatever its registration says. From
1.37 on it asks the drivers whose registration names the service, by the newest version that it knows, and drops
v1alpha1 in 1.40 (kubernetes: pkg/kubelet/cm/dra/plugin/dra_plugin.go, dra_plugin_manager.go; kubernetes#139477).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import grpc
import grpc.aio
from loguru import logger

from nri_gpu._pb import drahealth_pb2 as pb
from nri_gpu.domain.text import shown
from nri_gpu.dra.questions import NodeView, OfferedDevice
from nri_gpu.system.tasks import set_within

SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")  # the same on the wire, and in PluginInfo
MESSAGE_MAX: Final = 1000  # characters of ASCII; a pod's status has 1,024 bytes, and the kubelet cuts within characters
AGAIN_S: Final = 10.0  # after 30 s without word the kubelet takes a device's health for unknown


class DeviceHealthService:
    """The service, for any number of streams. pool: of all devices, the node's name. again_s: between two messages."""

    def __init__(self, pool: str, *, again_s: float = AGAIN_S) -> None:
        self.pool = pool
        self._again_s = again_s
        self._answer = pb.NodeWatchResourcesResponse()
        self._changed = asyncio.Event()

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        return tuple(
            grpc.method_handlers_generic_handler(service, {"NodeWatchResources": self._method(service)})
            for service in SERVICES
        )

    def _method(self, service: str) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(
            partial(self.watch, service),
            request_deserializer=pb.NodeWatchResourcesRequest.FromString,
            response_serializer=pb.NodeWatchResourcesResponse.SerializeToString,
        )

    def put(self, view: NodeView) -> None:
        """Take the daemon's view of the devices. The kubelet is told nothing before the first view of known devices."""
        answer = pb.NodeWatchResourcesResponse(devices=[self._health(each) for each in view.devices])
        if view.known and answer != self._answer:
            self._answer = answer
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def watch(
        self, service: str, request: pb.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.NodeWatchResourcesResponse]:
        logger.bind(method=service).debug("kubelet asks for the devices' health")
        while True:
            changed, answer = self._changed, pb.NodeWatchResourcesResponse()
            answer.CopyFrom(self._answer)
            for each in answer.devices:
                each.last_updated_time = int(time.time())
            yield answer
            await set_within(changed, self._again_s)

    def _health(self, device: OfferedDevice) -> pb.DeviceHealth:
        return pb.DeviceHealth(
            device=pb.DeviceIdentifier(pool_name=self.pool, device_name=device.name),
            health=pb.UNHEALTHY if device.fault else pb.HEALTHY,
            message=shown(device.fault, MESSAGE_MAX),
        )
