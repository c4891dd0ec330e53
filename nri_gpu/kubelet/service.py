"""The device plugin's five methods for one resource, on asyncio: no open stream holds a worker that Allocate needs.

Also the plugin watcher's two. Serves any number of kubelets' streams; each is sent the list when it changed, and never
otherwise, because every message makes the kubelet write its checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from loguru import logger

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu._pb import pluginregistration_pb2 as watcher
from nri_gpu.kubelet.devices import AdvertisedDevices, AllocationError, Device

VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
SETTLE_S: Final = 0.02  # changes come in bursts, of which the last is what matters


class DevicePlugin:
    """One resource.

    watched: a kubelet reads our list; it is cleared and `lost` set when the last one stops. aside: another plugin has
    the name, so our list is sent no more; what still comes to us is answered.
    """

    def __init__(self, resource: str, offers: AdvertisedDevices) -> None:
        self.resource = resource
        self.watched = asyncio.Event()
        self.lost = asyncio.Event()
        self.aside = False
        self._offers = offers
        self._streams: set[asyncio.Event] = set()

    def changed(self) -> None:
        """Something may be different from what was sent."""
        for stream in self._streams:
            stream.set()

    def handler(self) -> Any:  # noqa: ANN401 - grpc has no types
        """For a server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "GetDevicePluginOptions": unary(*_reshaped(self._options, pb.Empty)),
            "ListAndWatch": stream(*_reshaped(self._list_and_watch, pb.Empty)),
            "GetPreferredAllocation": unary(*_reshaped(self._preferred, pb.PreferredAllocationRequest)),
            "Allocate": unary(*_reshaped(self._allocate, pb.AllocateRequest)),
            "PreStartContainer": unary(*_reshaped(self._pre_start, pb.PreStartContainerRequest)),
        }
        return grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)

    async def _options(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: ANN401
        del request, context
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def _list_and_watch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:  # noqa: ANN401
        del request, context
        wake, sent = asyncio.Event(), None
        self._streams.add(wake)
        self.watched.set()
        try:
            while True:
                wake.clear()
                answer = sent if self.aside else list_to_pb(self._offers.devices(self.resource))
                if answer is not None and answer != sent:
                    sent = answer
                    yield answer
                await wake.wait()
                await asyncio.sleep(SETTLE_S)
        finally:
            self._streams.discard(wake)
            if not self._streams:
                self.watched.clear()
                self.lost.set()

    async def _preferred(self, request: pb.PreferredAllocationRequest, context: Any) -> pb.PreferredAllocationResponse:  # noqa: ANN401
        del context
        answer = pb.PreferredAllocationResponse()
        for each in request.container_requests:
            ids = self._hint(each)
            answer.container_responses.add(deviceIDs=ids)
        return answer

    def _hint(self, each: pb.ContainerPreferredAllocationRequest) -> tuple[str, ...]:
        try:
            return self._offers.preferred(
                self.resource, each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
            )
        except Exception:  # an error here would fail the pod, and no answer is as good as any
            logger.opt(exception=True).bind(resource=self.resource).error("no preferred allocation, by a bug of ours")
            return ()

    async def _allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: ANN401
        asked = [list(each.devices_ids) for each in request.container_requests]
        try:
            answers = self._offers.allocate(self.resource, asked)
        except AllocationError as error:
            logger.bind(resource=self.resource, reason=str(error)).info("allocation refused to the kubelet")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"nri-gpu: {error}")
        ids = ",".join(sorted(id_ for ids in asked for id_ in ids))
        logger.bind(resource=self.resource, gpu_uuid=ids).info("allocated to a pod by the kubelet")
        answer = pb.AllocateResponse()
        for given, each in zip(asked, answers, strict=True):
            response = answer.container_responses.add(annotations=each)
            if name := self._offers.required(self.resource, given):
                response.cdi_devices.add(name=name)
        return answer

    async def _pre_start(self, request: pb.PreStartContainerRequest, context: Any) -> pb.PreStartContainerResponse:  # noqa: ANN401
        del request, context
        return pb.PreStartContainerResponse()


class Watched:
    """What the plugin watcher asks of a socket that it found.

    verdict: why it was refused; empty when it was not; None where it has said nothing new. told: there is one.
    """

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.verdict: str | None = None
        self.told = asyncio.Event()

    def handler(self) -> Any:  # noqa: ANN401 - grpc has no types
        """For a server."""
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "GetInfo": unary(*_reshaped(self._info, watcher.InfoRequest)),
            "NotifyRegistrationStatus": unary(*_reshaped(self._status, watcher.RegistrationStatus)),
        }
        return grpc.method_handlers_generic_handler("pluginregistration.Registration", methods)

    async def _info(self, request: watcher.InfoRequest, context: Any) -> watcher.PluginInfo:  # noqa: ANN401
        del request, context
        return watcher.PluginInfo(type="DevicePlugin", name=self.resource, supported_versions=[VERSION])

    async def _status(self, request: watcher.RegistrationStatus, context: Any) -> watcher.RegistrationStatusResponse:  # noqa: ANN401
        del context
        self.verdict = "" if request.plugin_registered else request.error or "it did not say why"
        self.told.set()
        return watcher.RegistrationStatusResponse()


def list_to_pb(devices: tuple[Device, ...]) -> pb.ListAndWatchResponse:
    """The list. No topology where none is known: the kubelet takes 0 for NUMA node 0."""
    answer = pb.ListAndWatchResponse()
    for device in devices:
        made = answer.devices.add(ID=device.id, health="Unhealthy" if device.why else HEALTHY)
        if device.numa_node is not None:
            made.topology.nodes.add(ID=device.numa_node)
    return answer


def _reshaped(method: Callable[..., Any], request: Any) -> tuple[Any, ...]:  # noqa: ANN401 - generated classes
    return method, request.FromString, _bytes


def _bytes(message: Any) -> bytes:  # noqa: ANN401 - a generated class
    """Deterministic, so that the kubelet's checkpoint does not change for nothing."""
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded
