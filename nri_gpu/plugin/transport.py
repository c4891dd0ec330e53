"""The Unix socket, which feeds bytes to ttrpc, writes bytes, and closes when either side breaks the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import LocalProtocolError, NriGpuError, OversizeError, RemoteProtocolError
from nri_gpu.nri.codes import INTERNAL
from nri_gpu.system.tasks import STUCK_S
from nri_gpu.ttrpc import (
    RECEIVE_MAX,
    RUNTIME_SERVICE,
    ConnId,
    Mux,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    SendOversizeError,
    StreamId,
)

RUNTIME: Final = "nri.pkg.api.v1alpha1.Runtime"
# Without requests before we close: the Go mux may lose a reply that is followed at once by the end of the connection
# (containerd/nri pkg/net/multiplex/mux.go).
QUIET_S: Final = 0.1
# The same where the runtime validates: other plugins run between a creation and its validation.
VALIDATING_QUIET_S: Final = 1.0

Answer = Callable[[RequestReceived, int], ResponseSent]  # the int: nanoseconds since its bytes were read


class ConnectionLimits(Struct, frozen=True):
    """The limits at which a connection ends, and the waits before the next."""

    # For the answer to RegisterPlugin: the runtime accepts one plugin at a time and gives a silent one 5 s.
    register_s: float = 10.0
    synchronize_s: float = 15.0  # after the registration
    # A runtime sends one request at a time and reads the answer: if it leaves answers unread for so long, it hangs.
    stall_s: float = 10.0
    unread_bytes: int = 32 << 20  # of answers, which must not fill our memory before that
    # Before the next connection, after two and more that ended inside Synchronize. A runtime that panics in it needs
    # time to run, and a runtime that cannot finish it will not do so in milliseconds. With an attempt that still fails,
    # it is less than 30 s.
    cut_short_waits_s: tuple[float, ...] = (5.0, 10.0, 20.0, 25.0)
    # A registration that had to wait for the list for longer than the first of these, and the pauses before the next
    # registrations after it, where being away opens nothing.
    held_back_s: float = 1.0
    held_back_waits_s: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0, 60.0)
    stuck_s: float = STUCK_S  # without a synchronized connection for so long is an error in the log


LIMITS: Final = ConnectionLimits()


class RuntimeCallError(NriGpuError):
    """The runtime's error in answer to a call of ours: its text is the status that the runtime sent."""


class Transport(asyncio.Protocol):
    """An NRI connection. `closed` ends with the reason: None for the peer's orderly end.

    unsent: called with a request of whose answer no byte was sent, or that an error was sent for instead.
    """

    def __init__(self, answer: Answer, unsent: Callable[[RequestReceived], None], limits: ConnectionLimits) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[Exception | None] = loop.create_future()
        self._answer = answer
        self._unsent = unsent
        self._limits = limits
        self._loop = loop
        self._mux = Mux.for_plugin()
        self._pending: dict[StreamId, asyncio.Future[bytes]] = {}
        self._io: asyncio.Transport
        self._stall: asyncio.TimerHandle | None = None
        self._last_request = 0.0
        self._leaves_by: Collection[str] = ()
        self._reason: Exception | None = None  # ours for leaving

    @property
    def answered(self) -> float | None:
        """Return when the last request was answered, by the loop's clock; None before the first."""
        return self._last_request or None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the open socket."""
        assert isinstance(transport, asyncio.Transport)
        self._io = transport

    def data_received(self, data: bytes) -> None:
        """Take bytes; every complete request in them is answered before this returns."""
        read_at = self._loop.time()
        try:
            for conn_id, event in self._mux.feed(data):
                match event:
                    case RequestReceived():
                        self._last_request = self._loop.time()
                        waited_ns = int((self._last_request - read_at) * 1e9)
                        response = self._answer(event, waited_ns)
                        if event.method in self._leaves_by and response == ResponseSent(event.stream_id):
                            self._io.close()
                            return
                        if not self._write(self._reply(conn_id, event, response)):
                            self._unsent(event)
                    case ResponseReceived():
                        self._resolve(event)
                    case RequestRejected() if event.oversize_bytes:
                        # The rest of such a Synchronize never arrives; and the status that ttrpc prescribes makes
                        # runtimes that split it try again in smaller parts. Neither helps.
                        raise OversizeError(event.oversize_bytes, RECEIVE_MAX)
                    case RequestRejected():
                        logger.bind(stream_id=event.stream_id, reason=str(event.status)).warning("request rejected")
                        self._write(self._mux.send(conn_id, event))
            self._check_unread()
        except (RemoteProtocolError, LocalProtocolError) as error:
            self.abort(error)

    def eof_received(self) -> None:
        """Take the end of the runtime's side; returning None closes ours."""
        try:
            self._mux.receive_eof()
            for _ in self._mux.events():
                pass
        except (RemoteProtocolError, LocalProtocolError) as error:
            self.abort(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the calls that wait for an answer, and end `closed`: the socket is closed."""
        self.resume_writing()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionError("the runtime closed the connection"))
        self._pending.clear()
        if not self.closed.done():
            self.closed.set_result(exc or self._reason)

    def pause_writing(self) -> None:
        """Give a runtime that does not read `stall_s` to go on."""
        self._stall = self._loop.call_later(self._limits.stall_s, self._stalled)

    def resume_writing(self) -> None:
        """Stop waiting for a runtime that reads again."""
        if self._stall:
            self._stall.cancel()
            self._stall = None

    async def call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Call the runtime. Raises: RuntimeCallError, ConnectionError, TimeoutError."""
        if self.closed.done():
            raise ConnectionError("the runtime closed the connection")
        client = self._mux[RUNTIME_SERVICE]
        stream_id = client.next_stream_id
        future: asyncio.Future[bytes] = self._loop.create_future()
        request = RequestSent(stream_id, RUNTIME, method, payload, int(timeout_s * 1e9))
        self._write(self._mux.send(RUNTIME_SERVICE, request))
        self._pending[stream_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            client.forget(stream_id)
            raise
        finally:
            self._pending.pop(stream_id, None)

    async def drain(self, limit_s: float, leaves_by: Collection[str] = (), reason: Exception | None = None) -> None:
        """Answer the requests that are on their way, then close; at most limit_s seconds. reason: why we close.

        leaves_by: where the runtime validates, methods that succeed when we close instead of answering. The runtime
        removes a closed plugin only at the end of a request, and until then fails what it would have validated
        (containerd/nri: pkg/adaptation/adaptation.go, removeClosedPlugins): so we close at the end of such a request.
        """
        self._leaves_by, self._reason = leaves_by, reason
        quiet_s = VALIDATING_QUIET_S if leaves_by else QUIET_S
        deadline = self._loop.time() + limit_s
        await asyncio.sleep(0)
        while not self.closed.done() and (left := min(deadline, self._last_request + quiet_s) - self._loop.time()) > 0:
            await asyncio.wait({self.closed}, timeout=left)
        self._io.close()  # once the runtime has read what is written
        await asyncio.wait({self.closed}, timeout=max(deadline - self._loop.time(), QUIET_S))
        self.abort(TimeoutError("the runtime did not read our last answers"))

    def abort(self, error: Exception) -> None:
        """End the connection now. error: what `closed` ends with."""
        if not self.closed.done():
            self.closed.set_result(error)
        self._io.abort()

    def _reply(self, conn_id: ConnId, request: RequestReceived, response: ResponseSent) -> bytes:
        try:
            return self._mux.send(conn_id, response)
        except SendOversizeError as error:
            # An error refuses this container; the end of the connection would start it without its GPUs.
            logger.bind(stream_id=response.stream_id, fault=str(error)).error("answer too large")
            self._unsent(request)
            return self._mux.send(conn_id, ResponseSent(response.stream_id, status=INTERNAL))

    def _write(self, data: bytes) -> bool:
        """Write data. Return whether it may arrive, even in part: a failed write closes and empties the buffer."""
        self._io.write(data)
        return not self._io.is_closing() or self._io.get_write_buffer_size() > 0

    def _check_unread(self) -> None:
        if self._stall and self._io.get_write_buffer_size() > self._limits.unread_bytes:
            raise RemoteProtocolError(f"the runtime left {self._limits.unread_bytes >> 20} MiB of our answers unread")

    def _resolve(self, event: ResponseReceived) -> None:
        future = self._pending.pop(event.stream_id, None)
        if future is None or future.done():
            return
        if event.status.ok:
            future.set_result(event.payload)
        else:
            future.set_exception(RuntimeCallError(str(event.status)))

    def _stalled(self) -> None:
        self.abort(RemoteProtocolError(f"the runtime has not read our answers for {self._limits.stall_s:.0f} s"))
