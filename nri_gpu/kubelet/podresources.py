"""The kubelet's PodResources, asked over its socket: which devices it gave to which container."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from loguru import logger
from msgspec import Struct

from nri_gpu._pb import podresources_pb2 as pb
from nri_gpu.domain.container import Pod
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.kubelet import AllocatedDevice, ContainerDevices, PodDevices

GET_TIMEOUT_S: Final = 1.0
LIST_TIMEOUT_S: Final = 2.0
RECEIVE_MAX: Final = 16 << 20  # bytes; gRPC's own limit of 4 MiB is less than a full node's list can have
SERVICE: Final = "/v1.PodResourcesLister"
SHOWN_MAX: Final = 300  # characters of somebody else's error
# kubernetes: pkg/kubelet/apis/podresources/server_v1.go; both come as code UNKNOWN.
NO_GET: Final = "Get method disabled"
NOT_FOUND: Final = "not found"


class PodResourcesError(NriGpuError):
    """Why the kubelet did not answer."""


class PodResources:
    """A client. Connects when it is first asked; lives as long as its socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._channel: Any = None
        self._gets = True  # whether this kubelet answers Get

    async def get(self, namespace: str, name: str) -> PodDevices:
        """One pod; with no containers where the kubelet has no such pod. Raises: PodResourcesError."""
        if self._gets:
            request = pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
            try:
                answer = await self._call("Get", request, pb.GetPodResourcesResponse, GET_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                details = str(error.details())
                if error.code() is grpc.StatusCode.NOT_FOUND or NOT_FOUND in details:
                    return PodDevices(namespace, name)
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED and NO_GET not in details:
                    raise await self._failed(error) from None
                self._gets = False  # until the next connection
            else:
                given = _pod(answer.pod_resources)
                # Another pod than the one that was asked for is no answer.
                return given if (given.namespace, given.name) == (namespace, name) else PodDevices(namespace, name)
        listed = [pod for pod in await self.list() if (pod.namespace, pod.name) == (namespace, name)]
        if len(listed) > 1:
            raise PodResourcesError(f"the kubelet lists pod {namespace}/{name} twice, the old one and the new")
        return listed[0] if listed else PodDevices(namespace, name)

    async def list(self) -> tuple[PodDevices, ...]:
        """All pods; before Kubernetes 1.34 finished ones too. Raises: PodResourcesError."""
        try:
            answer = await self._call("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse, LIST_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error) from None
        return tuple(_pod(each) for each in answer.pod_resources)

    async def allocatable(self) -> Mapping[str, tuple[str, ...]]:
        """Resource -> ids that the kubelet may give at all, whoever has them. Raises: PodResourcesError."""
        request = pb.AllocatableResourcesRequest()
        try:
            answer = await self._call(
                "GetAllocatableResources", request, pb.AllocatableResourcesResponse, LIST_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error) from None
        found: dict[str, tuple[str, ...]] = {}
        for each in answer.devices:
            found[each.resource_name] = (*found.get(each.resource_name, ()), *each.device_ids)
        return found

    async def close(self) -> None:
        """End the connection; the next question makes another."""
        channel, self._channel, self._gets = self._channel, None, True
        if channel is not None:
            with contextlib.suppress(Exception):
                await channel.close()

    async def _call(self, method: str, request: Any, reply: Any, timeout_s: float) -> Any:  # noqa: ANN401
        if self._channel is None:
            if not self.socket.is_socket():  # gRPC would go on trying to connect, and says less of why
                raise PodResourcesError(f"there is no socket {self.socket}: the kubelet makes it at its start")
            options = (
                ("grpc.max_receive_message_length", RECEIVE_MAX),
                ("grpc.enable_retries", 0),
                # Else a new channel inherits the back-off of the one before it, to a socket that has gone.
                ("grpc.use_local_subchannel_pool", 1),
            )
            self._channel = grpc.aio.insecure_channel(f"unix:{self.socket}", options=options)
        unary = self._channel.unary_unary(
            f"{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return await unary(request, timeout=timeout_s)

    async def _failed(self, error: Any) -> PodResourcesError:  # noqa: ANN401 - grpc has no types
        await self.close()  # a kubelet that was restarted listens on another socket of the same name
        what = " ".join(str(error.details()).split())[:SHOWN_MAX]
        return PodResourcesError(
            f"the kubelet does not answer at {self.socket}: {error.code().name}: {ascii(what)[1:-1]}"
        )


def _pod(pod: pb.PodResources) -> PodDevices:
    return PodDevices(pod.namespace, pod.name, tuple(_container(each) for each in pod.containers))


def _container(container: pb.ContainerResources) -> ContainerDevices:
    # One entry for each NUMA node, so that a resource can come several times.
    devices = {AllocatedDevice(each.resource_name, id_): None for each in container.devices for id_ in each.device_ids}
    return ContainerDevices(container.name, tuple(devices))


PACE_S: Final = 0.02  # the kubelet answers 100 a second with a burst of 10, and we are not its only guest
LIST_EVERY_S: Final = 10.0
# From so many pods on that wait, one List is cheaper than a Get for each.
GETS_AT_ONCE: Final = 8
ASKED_MAX: Final = 256  # the next List tells of those that fall out
FIRST_WAIT_S: Final = 0.1
WAIT_MAX_S: Final = 5.0


class Book(Protocol):
    """Who keeps the answers."""

    def pods(self) -> tuple[Pod, ...]:
        """Sandboxes that are there."""
        ...

    def answered(self, pod: Pod, given: PodDevices) -> None:
        """What the kubelet says of one."""
        ...

    def tried(self) -> None:
        """A List was answered, or was not."""
        ...

    def listed(self, pods: tuple[Pod, ...], given: tuple[PodDevices, ...]) -> None:
        """What it says of all. pods: those that were there when it was asked."""
        ...


class QuestionPace(Struct, frozen=True):
    """Seconds. between: two questions. list_every: two Lists. first, most: waits after a failure."""

    between: float = PACE_S
    list_every: float = LIST_EVERY_S
    first: float = FIRST_WAIT_S
    most: float = WAIT_MAX_S


USUAL: Final = QuestionPace()


class Inquiry:
    """The questions."""

    def __init__(self, client: PodResources, book: Book, pace: QuestionPace = USUAL) -> None:
        self._client = client
        self._book = book
        self._pace = pace
        self._asked: deque[Pod] = deque(maxlen=ASKED_MAX)
        self._poked = asyncio.Event()
        self._said = ""
        self._wait_s = pace.first
        self._list_due = 0.0

    def ask(self, pod: Pod) -> None:
        """Soon."""
        if all(each.id != pod.id for each in self._asked):
            self._asked.append(pod)
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._something()
                try:
                    await self._next()
                except PodResourcesError as error:
                    await self._failed(str(error))
                except Exception as error:  # the other half serves on, whatever this one meets
                    logger.opt(exception=True).error("PodResources not read, by a bug of ours")
                    await self._failed(f"a bug of ours: {type(error).__name__}")
                else:
                    self._wait_s = self._pace.first
                    self._said = ""
                    await asyncio.sleep(self._pace.between)
        finally:
            await self._client.close()

    async def _something(self) -> None:
        """Until somebody asks, or it is time for a List."""
        left = self._list_due - asyncio.get_running_loop().time()
        if self._asked or left <= 0:
            return
        self._poked.clear()
        try:
            async with asyncio.timeout(left):
                await self._poked.wait()
        except TimeoutError:
            return

    async def _next(self) -> None:
        """One question. What waits for its answer is forgotten with it only."""
        if not self._asked or len(self._asked) > GETS_AT_ONCE or self._list_due <= asyncio.get_running_loop().time():
            await self._list()
            return
        pod = self._asked[0]
        given = await self._client.get(pod.namespace, pod.name)
        self._drop((pod,))
        self._book.answered(pod, given)

    async def _list(self) -> None:
        pods, asked = self._book.pods(), tuple(self._asked)
        try:
            given = await self._client.list()
            self._drop(asked)
            self._list_due = asyncio.get_running_loop().time() + self._pace.list_every
            self._book.listed(pods, given)
        finally:
            self._book.tried()

    def _drop(self, pods: tuple[Pod, ...]) -> None:
        """They are answered, as far as they will be."""
        ids = {pod.id for pod in pods}
        self._asked = deque((each for each in self._asked if each.id not in ids), maxlen=ASKED_MAX)

    async def _failed(self, sentence: str) -> None:
        """Wait a while; once for each new fault it is said."""
        if sentence != self._said:
            logger.bind(fault=sentence).warning("the kubelet does not tell what it gave, trying again")
        self._said = sentence
        await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(self._wait_s * 2, self._pace.most)
