"""The gRPC services on our sockets: the device plugin of one resource, and what the kubelet's plugin watcher calls.

They run on asyncio, so that no open stream holds a worker that Allocate needs. A list is sent only when it changed,
because every message makes the kubelet write its checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
from loguru import logger

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu._pb import deviceplugin_pb2_grpc as pb_grpc
from nri_gpu._pb import pluginregistration_pb2 as watcher_pb
from nri_gpu._pb import pluginregistration_pb2_grpc as watcher_grpc
from nri_gpu.domain.text import shown
from nri_gpu.kubelet.advertised import AdvertisedDevices, AllocationError, Device

VERSION: Final = "v1beta1"
SETTLE_S: Final = 0.02  # changes come in bursts, and only the last change matters


class DevicePluginService(pb_grpc.DevicePluginServicer):
    """The device plugin of one resource, for any number of streams. left: called when the last kubelet stops."""

    def __init__(self, resource: str, devices: AdvertisedDevices, left: Callable[[], None]) -> None:
        self.resource = resource
        self.watched = False  # a kubelet reads our list
        self.lost = False  # the last kubelet stopped reading
        self.paused = False  # another plugin has the resource's name: no list is sent, Allocate is still answered
        self._devices = devices
        self._left = left
        self._streams: set[asyncio.Event] = set()

    def changed(self) -> None:
        """Wake each stream: the list may differ from what was sent."""
        for stream in self._streams:
            stream.set()

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext
    ) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        wake, sent = asyncio.Event(), None
        self._streams.add(wake)
        self.watched = True
        try:
            while True:
                wake.clear()
                answer = sent if self.paused else list_to_pb(self._devices.devices(self.resource))
                if answer is not None and answer != sent:
                    sent = answer
                    yield answer
                await wake.wait()
                await asyncio.sleep(SETTLE_S)
        finally:
            self._streams.discard(wake)
            if not self._streams:
                self.watched, self.lost = False, True
                self._left()

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: grpc.aio.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        answer = pb.PreferredAllocationResponse()
        for each in request.container_requests:
            try:
                ids = self._devices.preferred(
                    self.resource, each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
                )
            except Exception:  # an error would fail the pod, and the kubelet can do without our preference
                logger.opt(exception=True).bind(resource=self.resource).error("bug: no preferred allocation")
                ids = ()
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def Allocate(self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext) -> pb.AllocateResponse:
        requested = [list(each.devices_ids) for each in request.container_requests]
        try:
            answers = self._devices.allocate(self.resource, requested)
        except AllocationError as error:
            logger.bind(resource=self.resource, reason=str(error)).info("Allocate refused")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"nri-gpu: {error}")
        ids = ",".join(sorted(id_ for ids in requested for id_ in ids))
        logger.bind(resource=self.resource, gpu_uuid=ids).info("GPUs allocated by the kubelet")
        response = pb.AllocateResponse()
        for answer in answers:
            cdi = [pb.CDIDevice(name=answer.cdi_device)] if answer.cdi_device else []
            response.container_responses.add(annotations=answer.annotations, cdi_devices=cdi)
        return response


class PluginWatcherService(watcher_grpc.RegistrationServicer):
    """The service that the kubelet's plugin watcher calls on a socket that it found. answered: told of a verdict."""

    def __init__(self, info: watcher_pb.PluginInfo, answered: Callable[[], None]) -> None:
        self._answered = answered
        self._info = info
        self._verdict: str | None = None

    def take_verdict(self) -> str | None:
        """Return why the watcher refused us, as a clause; empty if it accepted us; None while there is nothing new."""
        verdict, self._verdict = self._verdict, None
        return verdict

    async def GetInfo(
        self, request: watcher_pb.InfoRequest, context: grpc.aio.ServicerContext
    ) -> watcher_pb.PluginInfo:
        return self._info

    async def NotifyRegistrationStatus(
        self, request: watcher_pb.RegistrationStatus, context: grpc.aio.ServicerContext
    ) -> watcher_pb.RegistrationStatusResponse:
        why = shown(request.error or "it gave no reason", 300)
        self._verdict = "" if request.plugin_registered else f"the kubelet did not register it: {why}"
        self._answered()
        return watcher_pb.RegistrationStatusResponse()


def list_to_pb(devices: tuple[Device, ...]) -> pb.ListAndWatchResponse:
    """Make the list of devices. A device has no topology where none is known: the kubelet takes 0 for NUMA node 0."""
    answer = pb.ListAndWatchResponse()
    for device in devices:
        made = answer.devices.add(ID=device.id, health="Unhealthy" if device.why else "Healthy")
        if device.numa_node is not None:
            made.topology.nodes.add(ID=device.numa_node)
    return answer
