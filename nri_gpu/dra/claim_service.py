"""The gRPC service that the kubelet calls for claims. A claim's error is its own: it never spoils the whole call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import grpc
import grpc.aio
from loguru import logger

from nri_gpu._pb import dra_pb2 as pb
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.resource_claim import ClaimUid, usable_uid
from nri_gpu.domain.text import clipped
from nri_gpu.dra.preparation import ClaimPreparation, PreparedDevice
from nri_gpu.dra.questions import PreparedName

VERSIONS: Final = ("v1", "v1beta1")  # the newest first: the kubelet takes the first that it knows
SERVICES: Final = tuple(f"k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin" for version in VERSIONS)
SUPPORTED: Final = tuple(f"{version}.DRAPlugin" for version in VERSIONS)  # as PluginInfo has them
T = TypeVar("T")
SENTENCE_MAX: Final = 900  # characters; an event has 1,024, and the kubelet writes its own words before ours


class ClaimService:
    """The service in both versions, which are the same on the wire. failed: is told why a claim was not prepared."""

    def __init__(self, claims: ClaimPreparation, failed: Callable[[Exception], None]) -> None:
        self._claims = claims
        self._failed = failed

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        methods = {
            "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                self.prepare,
                request_deserializer=pb.NodePrepareResourcesRequest.FromString,
                response_serializer=pb.NodePrepareResourcesResponse.SerializeToString,
            ),
            "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
                self.unprepare,
                request_deserializer=pb.NodeUnprepareResourcesRequest.FromString,
                response_serializer=pb.NodeUnprepareResourcesResponse.SerializeToString,
            ),
        }
        return tuple(grpc.method_handlers_generic_handler(service, methods) for service in SERVICES)

    async def prepare(
        self, request: pb.NodePrepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodePrepareResourcesResponse:
        return pb.NodePrepareResourcesResponse(claims=await _each(request.claims, self._prepare))

    async def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeUnprepareResourcesResponse:
        return pb.NodeUnprepareResourcesResponse(claims=await _each(request.claims, self._unprepare))

    async def _prepare(self, claim: PreparedName) -> pb.NodePrepareResourceResponse:
        bound, began = logger.bind(namespace=claim.namespace, name=claim.name), time.monotonic()
        try:
            devices = await self._claims.prepare(claim)
            answer = pb.NodePrepareResourceResponse(devices=map(_device, devices))
        except Exception as error:
            self._failed(error)
            return pb.NodePrepareResourceResponse(error=_sentence(error, claim, "ResourceClaim not prepared"))
        elapsed_ms = (time.monotonic() - began) * 1000
        bound.bind(elapsed_ms=elapsed_ms, gpus=len(devices)).info("ResourceClaim prepared")
        return answer

    async def _unprepare(self, claim: PreparedName) -> pb.NodeUnprepareResourceResponse:
        try:
            if usable_uid(claim.uid):  # no other was ever prepared
                await self._claims.unprepare(claim.uid)
        except Exception as error:
            return pb.NodeUnprepareResourceResponse(error=_sentence(error, claim, "ResourceClaim not unprepared"))
        logger.bind(namespace=claim.namespace, name=claim.name).info("ResourceClaim unprepared")
        return pb.NodeUnprepareResourceResponse()


async def _each(claims: Iterable[pb.Claim], answer: Callable[[PreparedName], Awaitable[T]]) -> dict[str, T]:
    """Answer for all claims at once, by UID."""
    asked = {each.uid: PreparedName(ClaimUid(each.uid), each.namespace, each.name) for each in claims}
    return dict(zip(asked, await asyncio.gather(*map(answer, asked.values())), strict=True))


def _device(device: PreparedDevice) -> pb.Device:
    result = device.result
    return pb.Device(
        request_names=[result.request.partition("/")[0]],  # containers name the request, never its alternative
        pool_name=result.pool,
        device_name=result.device,
        cdi_device_ids=[device.cdi],
        share_id=result.share_id or None,
    )


def _sentence(error: Exception, claim: PreparedName, phrase: str) -> str:
    """Log an error and return the sentence for the kubelet. Only this function logs it: the kubelet tries again."""
    bound = logger.bind(namespace=claim.namespace, name=claim.name)
    if isinstance(error, NriGpuError):
        reason = clipped(str(error), SENTENCE_MAX)
        bound.bind(reason=reason).info(phrase)
        return f"nri-gpu: {reason}"
    bound.opt(exception=error).error("bug: request for a ResourceClaim failed")
    return f"nri-gpu: a bug ({type(error).__name__}): report it with the log of `nri-gpu dra`"
