"""Plays the container runtime on a real Unix socket, one step at a time, and every step has a deadline.

async with Listener(path) as listener:
    runtime = await listener.accept()
    await runtime.handshake(NRI_0_8)
    reply = await runtime.create(pod, container)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

from msgspec import Struct

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import (
    OK,
    PLUGIN_SERVICE,
    RUNTIME_SERVICE,
    ConnectionClosed,
    Mux,
    MuxEvent,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    Status,
)
from tests.support import nri_messages as nri
from tests.support.errors import HarnessError
from tests.support.nri_messages import NRI_0_8, REQUEST_TIMEOUT_NS, Flavour

PLUGIN: Final = "nri.pkg.api.v1alpha1.Plugin"
DEADLINE_S: Final = 10.0  # for what takes milliseconds, on a busy machine
READ_BYTES: Final = 1 << 18

T = TypeVar("T")


async def within(what: str, awaited: Awaitable[T], deadline_s: float = DEADLINE_S) -> T:
    """The result of something, if it comes in time. Raises: HarnessError."""
    try:
        async with asyncio.timeout(deadline_s):
            return await awaited
    except TimeoutError:
        raise HarnessError(f"{what}: still waiting after {deadline_s:.1f} s") from None


async def until(what: str, fact: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Returns once something holds. Raises: HarnessError."""

    async def watch() -> None:
        while not fact():  # noqa: ASYNC110 - facts of all kinds, none of which would set an Event for us
            await asyncio.sleep(0.001)

    await within(what, watch(), deadline_s)


class Registered(Struct, frozen=True):
    """How a plugin introduced itself. events: the mask it answered Configure with."""

    name: str
    index: str
    nri_version: str
    events: int


class Listener:
    """A runtime's NRI socket. Made by `open`, or on entering."""

    def __init__(self, path: Path, backlog: int = 16) -> None:
        self.path = path
        self._backlog = backlog
        self._socket: socket.socket | None = None
        self._accepted: list[ScriptedRuntime] = []

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        for runtime in self._accepted:
            runtime.close()

    def open(self) -> None:
        """Make the socket anew, as a runtime does at its start."""
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self.path))
        self._socket.listen(self._backlog)

    def close(self) -> None:
        """Stop listening; the socket file stays behind, as after a crash."""
        if self._socket:
            self._socket.close()
            self._socket = None

    async def accept(self, deadline_s: float = DEADLINE_S) -> ScriptedRuntime:
        """The next plugin's connection."""
        assert self._socket
        accepted = asyncio.get_running_loop().sock_accept(self._socket)
        sock, _ = await within("a plugin to connect", accepted, deadline_s)
        runtime = ScriptedRuntime(sock)
        self._accepted.append(runtime)
        return runtime


class ScriptedRuntime:
    """The runtime's end of one connection. Reads only while a step waits, so it can stop reading at any point."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.mux = Mux.for_runtime()
        self._socket = sock
        self._seen: list[MuxEvent] = []
        self.flavour = NRI_0_8

    # ---- the protocol, a step at a time

    async def registration(self) -> tuple[RequestReceived, pb.RegisterPluginRequest]:
        """The plugin's RegisterPlugin, unanswered."""
        event = await within("RegisterPlugin", self._take(RequestReceived))
        return event, pb.RegisterPluginRequest.FromString(event.payload)

    async def answer(self, request: RequestReceived, status: Status = OK) -> None:
        """Answer a call of the plugin's."""
        await self.write(self.mux.send(RUNTIME_SERVICE, ResponseSent(request.stream_id, status=status)))

    async def configure(self, flavour: Flavour = NRI_0_8, config: str = "") -> int:
        """Configure; the mask it is answered with."""
        self.flavour = flavour
        reply = await self.ask("Configure", nri.configure(flavour, config=config))
        return pb.ConfigureResponse.FromString(reply).events

    async def register(
        self, flavour: Flavour = NRI_0_8, *, configure_first: bool = False, config: str = ""
    ) -> Registered:
        """RegisterPlugin and Configure, in either order of replies: real runtimes do both."""
        request, said = await self.registration()
        if not configure_first:
            await self.answer(request)
        mask = await self.configure(flavour, config)
        if configure_first:
            await self.answer(request)
        return Registered(said.plugin_name, said.plugin_idx, said.NRI_version, mask)

    async def synchronize(
        self, pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = (), parts: int = 1
    ) -> None:
        """Synchronize. Raises: HarnessError where a part's answer has the wrong `more`, or an update."""
        for payload in nri.synchronize(pods, containers, parts):
            reply = pb.SynchronizeResponse.FromString(await self.ask("Synchronize", payload))
            more = pb.SynchronizeRequest.FromString(payload).more
            if reply.more != more or reply.update:
                raise HarnessError(f"a part with more={more} was answered {reply}")

    async def handshake(
        self, flavour: Flavour = NRI_0_8, pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = ()
    ) -> Registered:
        """All up to the first event."""
        registered = await self.register(flavour)
        await self.synchronize(pods, containers)
        return registered

    async def create(self, of: pb.PodSandbox, made: pb.Container) -> pb.CreateContainerResponse | Status:
        """CreateContainer: the reply, or the refusal."""
        response = await self.call("CreateContainer", nri.create(of, made))
        return pb.CreateContainerResponse.FromString(response.payload) if response.status.ok else response.status

    async def validate(
        self, of: pb.PodSandbox, made: pb.Container, replies: Mapping[str, pb.CreateContainerResponse]
    ) -> str:
        """ValidateContainerAdjustment of what plugins answered: why it is rejected, empty where it is not."""
        payload = await self.ask("ValidateContainerAdjustment", nri.validate(of, made, replies))
        verdict = pb.ValidateContainerAdjustmentResponse.FromString(payload)
        if bool(verdict.reason) != verdict.reject:
            raise HarnessError(f"a verdict that says one thing and does another: {verdict}")
        return verdict.reason

    async def event(self, kind: Event, of: pb.PodSandbox, made: pb.Container | None = None) -> Status:
        """Tell an event as this runtime's NRI version does."""
        method, payload = nri.event(kind, of, made, own_rpc=self.flavour.own_rpcs)
        return (await self.call(method, payload)).status

    # ---- the wire

    async def ask(self, method: str, payload: bytes = b"") -> bytes:
        """Call the plugin. Raises: HarnessError where it answers an error."""
        response = await self.call(method, payload)
        if not response.status.ok:
            raise HarnessError(f"{method} was answered {response.status}")
        return response.payload

    async def call(self, method: str, payload: bytes = b"") -> ResponseReceived:
        """Call the plugin, whatever it answers."""
        stream_id = self.mux[PLUGIN_SERVICE].next_stream_id
        await self.write(self.request(method, payload))
        deadline_s = max(DEADLINE_S, self.flavour.configure.get("request_timeout", 0) / 1000)
        answer = await within(f"the answer to {method}", self._take(ResponseReceived), deadline_s)
        if answer.stream_id != stream_id:
            raise HarnessError(f"answer on stream {answer.stream_id} to a call on {stream_id}")
        return answer

    def request(self, method: str, payload: bytes = b"", *, timeout_ns: int = REQUEST_TIMEOUT_NS) -> bytes:
        """The bytes of the next call, for tests that cut them up."""
        stream_id = self.mux[PLUGIN_SERVICE].next_stream_id
        return self.mux.send(PLUGIN_SERVICE, RequestSent(stream_id, PLUGIN, method, payload, timeout_ns))

    async def answers(self, count: int) -> list[ResponseReceived]:
        """The answers to calls that were written by hand."""
        return [await within("an answer", self._take(ResponseReceived)) for _ in range(count)]

    async def write(self, data: bytes) -> None:
        """Raw bytes. Raises: HarnessError where the plugin stops reading, OSError where it is gone."""
        await within("the plugin to read", asyncio.get_running_loop().sock_sendall(self._socket, data))

    async def ended(self, deadline_s: float = DEADLINE_S) -> None:
        """Until the plugin has closed the connection. What it still sends is thrown away."""
        await within("the plugin to close the connection", self._drained(), deadline_s)

    def finish_writing(self) -> None:
        """Half a goodbye: the plugin reads the end, and we still read."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Gone, as after a crash."""
        self._socket.close()

    async def _drained(self) -> None:
        try:
            while await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES):
                pass
        except ConnectionError:
            return

    async def _take(self, wanted: type[T]) -> T:
        while True:
            for position, (_, event) in enumerate(self._seen):
                if isinstance(event, wanted):
                    del self._seen[position]
                    return event
            await self._read()

    async def _read(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)
        if not data:
            raise HarnessError("the plugin closed the connection")
        for conn_id, event in self.mux.feed(data):
            if isinstance(event, (ConnectionClosed, RequestRejected)):
                raise HarnessError(f"the plugin broke the protocol on {conn_id}: {event}")
            self._seen.append((conn_id, event))
