"""Questions to the kubelet's PodResources socket: the devices that it allocated to each container."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import grpc
import grpc.aio
from loguru import logger
from msgspec import Struct

from nri_gpu._pb import podresources_pb2 as pb
from nri_gpu._pb import podresources_pb2_grpc as pb_grpc
from nri_gpu.domain.allocation import (
    NVIDIA_DRIVER,
    AllocatedDevice,
    ContainerDevices,
    DynamicDevice,
    PodDevices,
    claim_of_device,
)
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.text import shown
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.system.tasks import Backoff, LogOnce, set_within

GETS_MAX: Final = 8  # with more pods than this waiting, one List is cheaper than a Get for each
TIMEOUT_S: Final = 2.0
RECEIVE_MAX: Final = 16 << 20  # bytes; gRPC's own limit of 4 MiB is less than a full node's list can have
SHOWN_MAX: Final = 300  # characters of the kubelet's error
# kubernetes: pkg/kubelet/apis/podresources/server_v1.go; both come as code UNKNOWN.
NO_GET: Final = "Get method disabled"
NOT_FOUND: Final = "not found"
T = TypeVar("T")


class PodResourcesError(NriGpuError):
    """A failed question. Its sentence says why the kubelet did not answer."""


class NotServedError(PodResourcesError):
    """The kubelet's socket is not there, or the kubelet has no PodResources."""


class PodResources:
    """A client, which connects with its first request, and again after a failure. timeout_s: of each request."""

    def __init__(self, socket: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = socket
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._gets = True  # whether this kubelet answers Get

    async def get(self, namespace: str, name: str) -> PodDevices:
        """Return the devices of a pod; without containers if the kubelet has no such pod. Raises: PodResourcesError."""
        if self._gets:
            request = pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
            async with self._asking() as stub:
                try:
                    answer = await stub.Get(request, timeout=self._timeout_s)
                except grpc.aio.AioRpcError as error:
                    details = str(error.details())
                    if error.code() is grpc.StatusCode.NOT_FOUND or NOT_FOUND in details:
                        return PodDevices(namespace, name)
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED and NO_GET not in details:
                        raise
                    self._gets = False  # until the next connection
                else:
                    found = _pod(self._read(answer).pod_resources)
                    # An answer about another pod is no answer.
                    return found if (found.namespace, found.name) == (namespace, name) else PodDevices(namespace, name)
        listed = [pod for pod in await self.list() if (pod.namespace, pod.name) == (namespace, name)]
        if len(listed) > 1:
            raise PodResourcesError(f"the kubelet lists pod {namespace}/{name} twice, the old one and the new")
        return listed[0] if listed else PodDevices(namespace, name)

    async def list(self) -> tuple[PodDevices, ...]:
        """List all pods; before Kubernetes 1.34 finished pods too. Raises: PodResourcesError."""
        return tuple(_pod(each) for each in (await self.listing()).pod_resources)

    async def listing(self) -> pb.ListPodResourcesResponse:
        """Return the kubelet's answer to List as it is. Raises: PodResourcesError."""
        async with self._asking() as stub:
            answer: pb.ListPodResourcesResponse = await stub.List(pb.ListPodResourcesRequest(), timeout=self._timeout_s)
        return self._read(answer)

    async def allocatable(self) -> Mapping[str, tuple[str, ...]]:
        """Map each resource to the IDs of all devices that the kubelet can allocate, used or not.

        Raises: PodResourcesError.
        """
        async with self._asking() as stub:
            request = pb.AllocatableResourcesRequest()
            answer = self._read(await stub.GetAllocatableResources(request, timeout=self._timeout_s))
        found: dict[str, tuple[str, ...]] = {}
        for each in answer.devices:
            found[each.resource_name] = (*found.get(each.resource_name, ()), *each.device_ids)
        return found

    def _read(self, answer: T | None) -> T:
        """Return an answer. Raises: PodResourcesError: it is None, which gRPC makes of what protobuf cannot read."""
        if answer is None:
            raise PodResourcesError(f"the kubelet's answer at {self.socket} is no message of PodResources")
        return answer

    async def close(self) -> None:
        """End the connection; the next request makes a new connection."""
        channel, self._channel, self._gets = self._channel, None, True
        if channel is not None:
            with contextlib.suppress(Exception):
                await channel.close()

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[pb_grpc.PodResourcesListerStub]:
        """Lend a stub; an error of its request ends the connection. Raises: PodResourcesError, or no socket."""
        if self._channel is None:
            if not self.socket.is_socket():  # gRPC would keep trying to connect, and its error says less
                raise NotServedError(f"there is no socket {self.socket}: the kubelet makes it at its start")
            options = (
                ("grpc.max_receive_message_length", RECEIVE_MAX),
                ("grpc.enable_retries", 0),
                # Else a new channel inherits the back-off of the channel before it, to a socket that is gone.
                ("grpc.use_local_subchannel_pool", 1),
            )
            self._channel = grpc.aio.insecure_channel(f"unix:{self.socket}", options=options)
        try:
            yield pb_grpc.PodResourcesListerStub(self._channel)
        except grpc.aio.AioRpcError as error:
            await self.close()  # after a restart the kubelet listens on another socket of the same name
            what = shown(" ".join(str(error.details()).split()), SHOWN_MAX)
            failed = NotServedError if error.code() is grpc.StatusCode.UNIMPLEMENTED else PodResourcesError
            raise failed(f"the kubelet does not answer at {self.socket}: {error.code().name}: {what}") from None


def _pod(pod: pb.PodResources) -> PodDevices:
    return PodDevices(pod.namespace, pod.name, tuple(_container(each) for each in pod.containers))


def _container(container: pb.ContainerResources) -> ContainerDevices:
    # There is an entry for each NUMA node, so a resource can appear several times.
    devices = {AllocatedDevice(each.resource_name, id_): None for each in container.devices for id_ in each.device_ids}
    resources = [each for resource in container.dynamic_resources for each in resource.claim_resources]
    claims = {claim_of_device(device.name) for each in resources for device in each.cdi_devices}
    prepared = {
        DynamicDevice(each.pool_name, each.device_name): None  # of several shares, once
        for each in resources
        # Our own driver may have that name.
        if each.driver_name == NVIDIA_DRIVER and not any(claim_of_device(device.name) for device in each.cdi_devices)
    }
    return ContainerDevices(container.name, tuple(devices), frozenset(each for each in claims if each), tuple(prepared))


class QuestionPace(Struct, frozen=True):
    """The pace of questions, in seconds."""

    # Between two questions: the kubelet answers 100 requests a second with a burst of 10, and has other clients.
    between: float = 0.02
    list_every: float = 10.0  # between two Lists
    first: float = 0.1  # after a failure
    longest: float = 5.0  # at most, after several failures


USUAL: Final = QuestionPace()
SELDOM: Final = QuestionPace(list_every=math.inf)


class Inquiry:
    """Questions about new sandboxes at once, and a List now and then. listed: called with each List; or None."""

    def __init__(
        self,
        client: PodResources,
        pods: KubeletPods,
        listed: Callable[[tuple[PodDevices, ...]], None] | None,
        pace: QuestionPace = USUAL,
    ) -> None:
        self._client = client
        self._pods = pods
        self._listed = listed
        self._pace = pace
        self._waits = Backoff(pace.first, pace.longest, jitter=0.5)
        self._log = LogOnce()
        self._list_due = 0.0

    async def run(self) -> None:
        try:
            while True:
                await self._question()
                try:
                    await self._ask()
                except PodResourcesError as error:
                    fault = str(error)
                    self._pods.absent = isinstance(error, NotServedError)
                except Exception as error:  # the NRI plugin goes on serving, whatever goes wrong here
                    logger.opt(exception=True).error("PodResources not read because of a bug in nri-gpu")
                    fault = f"a bug in nri-gpu: {type(error).__name__}"
                else:
                    self._pods.absent = False
                    self._waits.reset()
                    self._log.clear()
                    await asyncio.sleep(self._pace.between)
                    continue
                self._log.warning("PodResources does not answer, trying again", fault)
                await self._pause(self._waits.next_s())
        finally:
            await self._client.close()

    async def _pause(self, seconds: float) -> None:
        """Wait for the next try. A new question brings it on where there was no socket: there may be one by now."""
        if self._client.socket.is_socket():
            await asyncio.sleep(seconds)
            return
        self._pods.asked.clear()
        await set_within(self._pods.asked, seconds)
        self._pods.absent = not self._client.socket.is_socket()

    async def _question(self) -> None:
        """Wait until there is a sandbox to ask about, or it is time for a List."""
        left_s = self._list_due - asyncio.get_running_loop().time()
        if self._pods.questions or left_s <= 0:
            return
        self._pods.asked.clear()
        await set_within(self._pods.asked, left_s)

    async def _ask(self) -> None:
        """Send a Get or List. A question that fails stays."""
        questions = self._pods.questions
        if not questions or len(questions) > GETS_MAX or self._list_due <= asyncio.get_running_loop().time():
            await self._list()
            return
        pod = questions[0]
        devices = await self._client.get(pod.namespace, pod.name)
        self._pods.answered((pod,))
        self._pods.put(pod, devices)

    async def _list(self) -> None:
        pods, questions = self._pods.all(), tuple(self._pods.questions)
        try:
            listed = await self._client.list()
            self._pods.answered(questions)
            self._list_due = asyncio.get_running_loop().time() + self._pace.list_every
            self._pods.put_list(pods, listed)
            if self._listed:
                self._listed(listed)
        finally:
            self._pods.settled = True
