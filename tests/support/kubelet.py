"""A kubelet as far as a device plugin can tell: a real gRPC server and client on sockets of its own.

It does what the reference says of kubelets, traps included: sockets are deleted at its start; `Register` dials back and
asks for options before it answers; ids come in random order; answers are kept in a checkpoint and handed out again; a
stream that ends leaves its devices unhealthy, and is never opened again by itself; one pod is admitted at a time.
Source: kubernetes/kubernetes pkg/kubelet/cm/devicemanager (manager.go, plugin/v1beta1/{server,handler,client}.go).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu._pb import deviceplugin_pb2_grpc as pb_grpc
from nri_gpu._pb import pluginregistration_pb2 as watcher
from nri_gpu._pb import pluginregistration_pb2_grpc as watcher_grpc

WAIT_S = 10.0
# Of a qualified name, before the slash and after it (apimachinery: pkg/util/validation).
QUALIFIED = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass
class Client:
    """One registered plugin. devices: of its last message, id -> whether it is healthy."""

    resource: str
    path: Path
    channel: Any
    options: pb.DevicePluginOptions
    devices: dict[str, pb.Device] = field(default_factory=dict)
    messages: int = 0
    ended: bool = False
    reading: asyncio.Task[None] | None = None

    @property
    def stub(self) -> Any:  # noqa: ANN401 - generated, without types
        return pb_grpc.DevicePluginStub(self.channel)


class AdmissionError(Exception):
    """UnexpectedAdmissionError, or too few devices."""


async def _answered(method: Any, request: Any) -> Any:  # noqa: ANN401 - grpc's
    """The answer of a device plugin. Raises: AdmissionError: it failed, or its client was dropped meanwhile."""
    try:
        return await method(request, timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        raise AdmissionError(error.details()) from None
    except grpc.aio.UsageError as error:
        raise AdmissionError(str(error)) from None


class Kubelet(pb_grpc.RegistrationServicer):
    """On a folder that stands for /var/lib/kubelet.

    refuse: what Register is answered instead; empty: accept. deaf: registers a plugin and never asks for its devices.
    version: of the device plugins that it accepts.
    """

    def __init__(self, folder: Path, *, keyed_by_resource: bool = True) -> None:
        self.dir = folder / "device-plugins"
        self.registry = folder / "plugins_registry"
        self.refuse = ""
        self.deaf = False
        self.version = "v1beta1"
        self.registered = self.refused = self.allocations = 0
        self.cdi_devices: tuple[str, ...] = ()  # of the last Allocate
        self.clients: dict[str, Client] = {}
        self.checkpoint: dict[tuple[str, str], dict[str, tuple[tuple[str, ...], Mapping[str, str]]]] = {}
        self._keyed_by_resource = keyed_by_resource  # before kubernetes#135437
        self._changed = asyncio.Condition()
        self._admitting = asyncio.Lock()
        self._server: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._seen: set[Path] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Make the folder, delete every socket in it, listen."""
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        self.registry.mkdir(parents=True, exist_ok=True)
        for path in self.dir.iterdir():
            if path.is_socket():
                path.unlink()
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.dir}/kubelet.sock")
        await self._server.start()
        self._seen.clear()
        self._watching = asyncio.create_task(self._watch_registry())

    async def stop(self) -> None:
        """Go, with every connection; the checkpoint stays."""
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for client in list(self.clients.values()):
            await self._close(client)
        self.clients.clear()
        if self._server:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def wait(self, what: str, condition: Any, timeout_s: float = WAIT_S) -> None:  # noqa: ANN401 - a predicate
        """Until something holds, looked at whenever a message came."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"no {what} within {timeout_s} s; there is {self.state()}") from None

    async def wait_healthy(self, resource: str, count: int) -> None:
        await self.wait(f"{count} healthy {resource}", lambda: len(self.healthy(resource)) == count)

    def state(self) -> dict[str, dict[str, str]]:
        return {
            name: {id_: device.health for id_, device in client.devices.items()}
            for name, client in self.clients.items()
        }

    def capacity(self, resource: str) -> int:
        return len(self.clients[resource].devices) if resource in self.clients else 0

    def healthy(self, resource: str) -> list[str]:
        """Allocatable: none once the stream has ended."""
        client = self.clients.get(resource)
        if client is None or client.ended:
            return []
        return sorted(id_ for id_, device in client.devices.items() if device.health == "Healthy")

    def in_use(self, resource: str) -> set[str]:
        return {id_ for given in self.checkpoint.values() for id_ in given.get(resource, ((), {}))[0]}

    async def admit_pod(self, pod: str, containers: Sequence[tuple[str, Mapping[str, int], bool]]) -> None:
        """All containers in order: name, what it is limited to, and whether it ends before the next is created.

        The devices of one that ends go to later ones (devicesToReuse). Raises: AdmissionError: it has none of them.
        """
        reusable: dict[str, set[str]] = {}
        try:
            for name, wants, ends in containers:
                await self.admit(pod, name, wants, reusable)
                for resource, (ids, _) in self.checkpoint[pod, name].items():
                    before = reusable.get(resource, set())
                    reusable[resource] = before.union(ids) if ends else before.difference(ids)
        except AdmissionError:
            self.remove(pod)
            raise

    async def admit(
        self, pod: str, container: str, wants: Mapping[str, int], reusable: Mapping[str, set[str]] | None = None
    ) -> Mapping[str, str]:
        """The annotations for a container, as devicesToAllocate and Allocate give them; kept for its restarts."""
        async with self._admitting:
            given = dict(self.checkpoint.get((pod, container), {}))
            for resource, count in wants.items():
                has = given.get(resource, ((), {}))[0]
                if not set(has) <= set(self.healthy(resource)):
                    raise AdmissionError(
                        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices "
                        f"{resource}"
                    )
                if len(has) < count:
                    given[resource] = await self._allocate(resource, count, (reusable or {}).get(resource, set()))
            self.checkpoint[pod, container] = given
            return self.replayed(pod, container)

    def replayed(self, pod: str, container: str) -> Mapping[str, str]:
        """What the checkpoint hands out at each start; on a key that comes twice one wins, in random order."""
        answers = [annotations for _, annotations in self.checkpoint[pod, container].values()]
        random.shuffle(answers)
        merged: dict[str, str] = {}
        for each in answers:
            merged = {**each, **merged}
        return merged

    def remove(self, pod: str) -> None:
        """The pod is over."""
        self.checkpoint = {key: given for key, given in self.checkpoint.items() if key[0] != pod}

    async def _allocate(
        self, resource: str, count: int, reusable: set[str]
    ) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """devicesToAllocate: the reusable, then of those that are free, with a hint where there is a choice."""
        kept = shuffled(reusable)[:count]
        chosen = (set(self.healthy(resource)) - self.in_use(resource)).union(kept)
        if len(chosen) < count:
            raise AdmissionError(f"requested {count} of {resource}, available {len(chosen)}")
        if len(chosen) > count:
            chosen = await self.preferred(resource, chosen, kept, count)
        ids = shuffled(chosen)
        response = await self.allocate(resource, ids)
        return tuple(ids), dict(response.container_responses[0].annotations)

    async def preferred(self, resource: str, available: set[str], must: Sequence[str], count: int) -> set[str]:
        """The hint, cut to what is allowed and filled from the rest."""
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=shuffled(available), must_include_deviceIDs=must, allocation_size=count
        )
        answer = await _answered(self.clients[resource].stub.GetPreferredAllocation, request)
        hinted = [id_ for id_ in answer.container_responses[0].deviceIDs if id_ in available - set(must)]
        chosen = [*must, *hinted][:count]
        return {*chosen, *shuffled(available - set(chosen))[: count - len(chosen)]}

    async def allocate(self, resource: str, *containers: Sequence[str]) -> pb.AllocateResponse:
        """The bare call. Raises: AdmissionError."""
        request = pb.AllocateRequest()
        for ids in containers:
            request.container_requests.add(devices_ids=ids)
        self.allocations += 1
        answer: pb.AllocateResponse = await _answered(self.clients[resource].stub.Allocate, request)
        self.cdi_devices = tuple(device.name for device in answer.container_responses[0].cdi_devices)
        return answer

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:  # noqa: ANN401
        if why := self.refuse or self._invalid(request.resource_name, request.version):
            await self._refused()
            await context.abort(grpc.StatusCode.UNKNOWN, why)
        await self._connect(request.resource_name, self.dir / request.endpoint)
        self.registered += 1
        return pb.Empty()

    def _invalid(self, resource: str, *versions: str) -> str:
        """Why it refuses to register that; empty when it does not."""
        if versions != (self.version,):
            asked = ",".join(versions)
            return f"requested API version {asked!r} is not supported by kubelet. Supported version is {self.version}"
        return invalid(resource)

    async def _connect(self, resource: str, path: Path) -> None:
        """Dial back and ask, before Register is answered."""
        channel = grpc.aio.insecure_channel(f"unix:{path}")
        client = Client(resource, path, channel, pb.DevicePluginOptions())
        client.options = await client.stub.GetDevicePluginOptions(pb.Empty(), timeout=WAIT_S)
        former = self.clients.get(resource)
        if former and not former.ended:
            client.devices = former.devices  # until the new one's first message
        self.clients[resource] = client  # the last one of a name wins, and nobody is told
        if not self.deaf:
            client.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: Client) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in client.stub.ListAndWatch(pb.Empty()):
                client.messages += 1
                client.devices = {device.ID: device for device in message.devices}
                await self._tell()
        client.ended = True
        now = self.clients.get(client.resource)
        if now is not None and now is not client and self._keyed_by_resource:
            await self._close(now)  # kubernetes#121994: the end of the old one takes the new one along
        await self._tell()

    async def _close(self, client: Client) -> None:
        if client.reading:
            client.reading.cancel()
            await asyncio.gather(client.reading, return_exceptions=True)
        await client.channel.close()
        client.ended = True
        await self._tell()

    async def end_stream(self, resource: str) -> None:
        """Break one connection, for whatever reason."""
        await self._close(self.clients[resource])

    async def _refused(self) -> None:
        self.refused += 1
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_registry(self) -> None:
        """The plugin watcher: sockets below its folder, each dialled once, and not again if it was refused."""
        while True:
            there = {path for path in self.registry.rglob("*") if path.is_socket() and not path.name.startswith(".")}
            self._seen &= there
            for path in sorted(there - self._seen):
                self._seen.add(path)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self._found(path)
            await asyncio.sleep(0.05)

    async def _found(self, path: Path) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub: Any = watcher_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(watcher.InfoRequest(), timeout=WAIT_S)
            why = self.refuse or self._invalid(info.name, *info.supported_versions)
            status = watcher.RegistrationStatus(plugin_registered=not why, error=why)
            if why:
                await self._refused()
            else:
                assert info.type == "DevicePlugin"
                await self._connect(info.name, Path(info.endpoint) if info.endpoint else path)
                self.registered += 1
            await stub.NotifyRegistrationStatus(status, timeout=WAIT_S)


class Rival(pb_grpc.DevicePluginServicer):
    """Another device plugin of the same resource, as NVIDIA's is: serves its socket first, registers, and stays.

    folder: the kubelet's, of device plugins.
    """

    def __init__(self, folder: Path, resource: str, ids: Sequence[str]) -> None:
        self.path = folder / f"nvidia-{resource.partition('/')[2]}.sock"
        self._kubelet = folder / "kubelet.sock"
        self._resource = resource
        self._list = pb.ListAndWatchResponse(devices=[pb.Device(ID=id_, health="Healthy") for id_ in ids])
        self._server: Any = None

    async def __aenter__(self) -> Self:
        """Listen only."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        self.path.unlink(missing_ok=True)

    async def register(self) -> None:
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}") as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint=self.path.name, resource_name=self._resource)
            await pb_grpc.RegistrationStub(channel).Register(request)

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: ANN401
        del request, context
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> Any:  # noqa: ANN401 - an iterator
        del request, context
        yield self._list
        await asyncio.Event().wait()


def invalid(resource: str) -> str:
    """Why a kubelet refuses a resource of that name; empty when it does not."""
    domain, slash, name = resource.partition("/")
    native = not slash or domain == "kubernetes.io" or domain.endswith(".kubernetes.io")
    if native or resource.startswith("requests.") or not QUALIFIED.fullmatch(domain) or not NAME.fullmatch(name):
        return f"the ResourceName {resource!r} is invalid"
    return ""


def shuffled(ids: Any) -> list[str]:  # noqa: ANN401 - any collection
    """In Go's map order, which is none."""
    ordered = sorted(ids)
    random.shuffle(ordered)
    return ordered
