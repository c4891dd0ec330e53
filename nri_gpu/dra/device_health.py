"""Tells the kubelet how the published devices are, so that pods show it in `allocatedResourcesStatus`.

The kubelet (gate ResourceHealthStatus, on from 1.36) asks each driver, whatever it says that it supports, and logs an
error every five seconds where nobody answers (kubernetes: pkg/kubelet/cm/dra/plugin/dra_plugin.go).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from nri_gpu._pb import drahealth_pb2 as pb
from nri_gpu.dra.devices import UNHEALTHY
from nri_gpu.dra.messages import NodeView, OfferedDevice
from nri_gpu.system.tasks import first_done

SERVICE: Final = "v1alpha1.DRAResourceHealth"
AGAIN_S: Final = 10.0  # after 30 s without word the kubelet takes a device's health for unknown


class DeviceHealthService:
    """For any number of streams. pool: of all devices, the node's name. again_s: seconds between two messages."""

    def __init__(self, pool: str, *, again_s: float = AGAIN_S) -> None:
        self.pool = pool
        self._again_s = again_s
        self._answer = pb.NodeWatchResourcesResponse()
        self._changed = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_stream_rpc_method_handler(
            self.watch,
            request_deserializer=pb.NodeWatchResourcesRequest.FromString,
            response_serializer=pb.NodeWatchResourcesResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"NodeWatchResources": method})

    def put(self, view: NodeView) -> None:
        """What the daemon says of the devices now. Nothing is told before it knows them."""
        answer = pb.NodeWatchResourcesResponse(devices=[self._health(each) for each in view.devices])
        if view.known and answer != self._answer:
            self._answer = answer
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def watch(
        self, request: pb.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.NodeWatchResourcesResponse]:
        while True:
            changed, answer = self._changed, pb.NodeWatchResourcesResponse()
            answer.CopyFrom(self._answer)
            for each in answer.devices:
                each.last_updated_time = int(time.time())
            yield answer
            await first_done(changed.wait(), timeout_s=self._again_s)

    def _health(self, device: OfferedDevice) -> pb.DeviceHealth:
        fault = next((taint.value for taint in device.taints if taint.key == UNHEALTHY), None)
        return pb.DeviceHealth(
            device=pb.DeviceIdentifier(pool_name=self.pool, device_name=device.name),
            health=pb.HEALTHY if fault is None else pb.UNHEALTHY,
            message=fault or "",
        )
