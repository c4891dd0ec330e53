"""The kubelet's PodResources on a socket: a real gRPC server that says what a test tells it to.

As the kubelet has it: no UIDs, no plain init containers, `Get` switched off before 1.34, a limit of calls a second, and
nothing at all while it is down. Source: kubernetes/kubernetes pkg/kubelet/apis/podresources (server_v1.go).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from nri_gpu._pb import podresources_pb2 as pb
from nri_gpu._pb import podresources_pb2_grpc as pb_grpc

Given = Mapping[str, Mapping[str, Sequence[str]]]  # container -> resource -> ids

UNLISTED: Given = {}


class PodResourcesServer(pb_grpc.PodResourcesListerServicer):
    """Its methods are the API's.

    pods: (namespace, name) -> what each container has. claimed: the same -> the CDI devices of its claims.
    prepared: the same -> what NVIDIA's DRA driver prepared, pool and device of each.
    gets: whether `Get` is on. asked: calls, in order.
    """

    def __init__(self, folder: Path, *, gets: bool = True) -> None:
        self.folder = folder / "pod-resources"
        self.socket = self.folder / "kubelet.sock"
        self.pods: dict[tuple[str, str], Given] = {}
        self.claimed: dict[tuple[str, str], Mapping[str, Sequence[str]]] = {}
        self.prepared: dict[tuple[str, str], Mapping[str, Sequence[tuple[str, str]]]] = {}
        self.twice: set[tuple[str, str]] = set()  # a pod of that name that is over, and its successor
        self.gets = gets
        self.fault: tuple[grpc.StatusCode, str] | None = None
        self.delay_s = 0.0
        self.asked: list[str] = []
        self._server: Any = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(None)
            self._server = None
        self.socket.unlink(missing_ok=True)

    def give(self, name: str, given: Given, namespace: str = "default") -> None:
        self.pods[namespace, name] = given

    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: ANN401
        del request
        await self._begin("List", context)
        pods = [self._pod(key, given) for key, given in self.pods.items()]
        pods += [self._pod(key, UNLISTED) for key in self.twice]
        return pb.ListPodResourcesResponse(pod_resources=pods)

    async def Get(self, request: pb.GetPodResourcesRequest, context: Any) -> pb.GetPodResourcesResponse:  # noqa: ANN401
        key = (request.pod_namespace, request.pod_name)
        await self._begin(f"Get {'/'.join(key)}", context)
        if not self.gets:
            await context.abort(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
        if key not in self.pods:
            await context.abort(grpc.StatusCode.UNKNOWN, f"pod {key[1]} in namespace {key[0]} not found")
        return pb.GetPodResourcesResponse(pod_resources=self._pod(key, self.pods[key]))

    async def GetAllocatableResources(
        self,
        request: pb.AllocatableResourcesRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.AllocatableResourcesResponse:
        del request
        await self._begin("GetAllocatableResources", context)
        each = {id_: r for given in self.pods.values() for c in given.values() for r, ids in c.items() for id_ in ids}
        # One entry for each NUMA node, as here each device has its own.
        devices = [pb.ContainerDevices(resource_name=resource, device_ids=[id_]) for id_, resource in each.items()]
        return pb.AllocatableResourcesResponse(devices=devices)

    def _pod(self, key: tuple[str, str], given: Given) -> pb.PodResources:
        pod = pb.PodResources(namespace=key[0], name=key[1])
        for name, resources in given.items():
            container = pod.containers.add(name=name, cpu_ids=[0])
            for resource, ids in resources.items():
                for id_ in ids:
                    container.devices.add(resource_name=resource, device_ids=[id_])
            devices = [pb.CDIDevice(name=each) for each in self.claimed.get(key, {}).get(name, ())]
            found = pb.ClaimResource(cdi_devices=devices, driver_name="gpu.nri.io")
            container.dynamic_resources.add(claim_name="shared", claim_namespace=key[0], claim_resources=[found])
            for number, (pool, device) in enumerate(self.prepared.get(key, {}).get(name, ())):
                cdi = pb.CDIDevice(name=f"k8s.gpu.nvidia.com/claim=8c5e-{device}")
                theirs = pb.ClaimResource(
                    cdi_devices=[cdi], driver_name="gpu.nvidia.com", pool_name=pool, device_name=device
                )
                container.dynamic_resources.add(
                    claim_name=f"theirs-{number}", claim_namespace=key[0], claim_resources=[theirs]
                )
        return pod

    async def _begin(self, call: str, context: Any) -> None:  # noqa: ANN401
        self.asked.append(call)
        await asyncio.sleep(self.delay_s)
        if self.fault:
            await context.abort(*self.fault)


class PodResourcesThread:
    """The same in a thread with a loop of its own, for tests that block."""

    def __init__(self, folder: Path) -> None:
        self.server = PodResourcesServer(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> PodResourcesServer:
        self._thread.start()
        self.do(self.server.start())
        return self.server

    def __exit__(self, *_: object) -> None:
        self.do(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def do(self, action: Any) -> Any:  # noqa: ANN401 - a coroutine
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(10)
