"""The connection to the runtime, made and served again and again: while we are away, the runtime fails open."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import TOLD_WITHIN_S
from nri_gpu.domain.errors import LocalProtocolError, OversizeError, RemoteProtocolError, cause_of, fault_of
from nri_gpu.nri.convert import Configured, register_to_pb
from nri_gpu.nri.list_size import ListSize
from nri_gpu.nri.subscription import Subscription, holds_list_back
from nri_gpu.plugin.nri_service import EVENT_METHODS, NriHandlers, PluginService, SynchronizeFacts
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.transport import LIMITS, ConnectionLimits, RuntimeCallError, Transport
from nri_gpu.system.process import has_our_pids
from nri_gpu.system.tasks import Backoff, LogOnce

NRI_VERSION: Final = "0.12.2"  # the newest whose messages we know; sent to runtimes from 0.12 on
# Between two tries; a random share of nine tenths spreads the plugins, so the first comes after 5 to 50 ms.
FIRST_WAIT_S: Final = 0.05
WAIT_MAX_S: Final = 0.25
JITTER: Final = 0.9
LOOK_S: Final = 0.1  # while Synchronize is waited for
STOOD_STILL: Final = 0.8  # of the runtime's timeout: the request may have come before, and the answer takes its time
LISTED_ANEW: Final = "a container that holds a GPU is listed as running without a PID: requesting the list again"
LEAVE_S: Final = 2.0
LEAVES_BY: Final = frozenset({"StateChange", *EVENT_METHODS})  # with no answer to one of these, a runtime goes on
UNLISTED: Final = (
    "registered, but the runtime has not listed its containers yet: containerd waits for a container that it is "
    "stopping, up to the pod's grace period, and creates and starts none until then"
)
PUT_OFF: Final = (
    "the runtime held the last registration back, so it may create containers before the next one; what the kubelet or "
    "a claim allocated cannot start meanwhile (docs/upgrade.md)"
)
NEVER_TOLD: Final = (
    "containers that outlive a restart of the runtime stay unknown, so their GPUs can be granted twice; "
    "take nri-gpu out of the runtime's plugin folder and run it as a service"
)
RUNTIME_SOCKETS: Final = (Path("/run/containerd/containerd.sock"), Path("/var/run/containerd/containerd.sock"))


class Identity(Struct, frozen=True):
    """The name and index by which we register. index: two digits; plugins are called in its order."""

    name: str
    index: str


class SessionFacts(Struct, frozen=True):
    """The facts of our connections that `status` shows. answered: when we last answered, by the monotonic clock."""

    answered: float | None = None
    synchronize: SynchronizeFacts | None = None


class SessionFollowers(Struct, frozen=True):
    """The functions to call at each step of a session."""

    configured: Callable[[Configured], None]  # with the runtime's introduction, before any other request
    ready: Callable[[], None]
    away: Callable[[str], None]  # with the reason
    # With the reason, where the runtime took us and keeps every creation back until it has listed its containers.
    waits: Callable[[str], None]


class Supervisor:
    """The one session, made again whenever it ends. `stop` answers the calls in flight and ends it.

    away_opens_nothing: whether no container can start here without what it was granted while we are not connected.
    """

    def __init__(
        self,
        plugin: NriHandlers,
        identity: Callable[[], Identity],
        followers: SessionFollowers,
        sizes: Sizes,
        limits: ConnectionLimits = LIMITS,
        *,
        away_opens_nothing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plugin = plugin
        self._sizes = sizes
        self._limits = limits
        self._stood_still = False  # on the last connection that synchronized, too long for the runtime
        self._cut_short = 0  # connections in a row that ended inside Synchronize
        self._held_back = 0  # registrations in a row that had to wait for the list
        self._away_opens_nothing = away_opens_nothing
        self._identity = identity
        self._followers = followers
        self._transport: Transport | None = None
        self._stopping = False
        self._inherited = False
        self._faults = LogOnce(stuck_s=limits.stuck_s)
        self._backoff = Backoff(FIRST_WAIT_S, WAIT_MAX_S, jitter=JITTER)
        self._was_ready = False
        self._subscription = Subscription()
        self._holds_list_back = True  # as far as is known of the runtime
        self._facts = SessionFacts()

    async def run(self, path: Path) -> None:
        """Serve the socket at a path until stopped, whatever happens to it."""
        while not self._stopping:
            missing, wait_s = False, 0.0
            try:
                wait_s = await self._session(path=str(path))
                await self._stay_away()
            except OSError as error:
                missing = error.errno == errno.ENOENT
                self._report(*explain(error, path), path)
            if self._was_ready or missing:
                self._backoff.reset()
                self._was_ready = False
            if not self._stopping:
                await (_socket_appears(path) if missing else asyncio.sleep(wait_s or self._backoff.next_s()))

    async def run_inherited(self, fd: int) -> None:
        """Serve the connection that we were started with, until it ends."""
        self._inherited = True
        await self._session(sock=socket.socket(fileno=fd))

    async def stop(self, limit_s: float) -> None:
        """Answer the calls in flight, for limit_s at most, then close."""
        self._stopping = True
        if self._transport:
            await self._transport.drain(limit_s, LEAVES_BY if self.validates else ())

    @property
    def validates(self) -> bool:
        """Return whether the runtime asks us before it creates a container (NRI 0.10)."""
        return self._subscription.validates

    @property
    def facts(self) -> SessionFacts:
        """Return the facts of the current session, or of the last one while there is none."""
        answered = self._transport.answered if self._transport else None
        return replace(self._facts, answered=answered) if answered else self._facts

    async def _session(self, path: str | None = None, sock: socket.socket | None = None) -> float:
        """Serve one connection, from register to close. Return the seconds to wait before the next, 0 for the usual.

        path: of the socket to connect to, or sock: a connected socket. Raises: OSError: it could not connect.
        """
        loop = asyncio.get_running_loop()
        ready = loop.create_future()

        def on_ready() -> None:
            self._was_ready, self._cut_short = True, 0
            self._faults.clear()
            self._facts = replace(self._facts, synchronize=service.synchronize_facts())
            self._followers.ready()
            ready.set_result(None)

        service = PluginService(self._plugin, self._configured, on_ready, self._sizes, self._subscription)
        io, transport = await loop.create_unix_connection(
            lambda: Transport(service.answer, service.unsent, self._limits), path, sock=sock
        )
        self._transport = transport
        self._plugin.same_pids = has_our_pids(io.get_extra_info("socket"))
        try:
            await self._register(transport)
            both, limit_s = {ready, transport.closed}, self._limits.synchronize_s
            still_s = await _first_of(both, service.configured_at, limit_s)
            # A new connection would wait behind this one, and what waits for its end would run without us first.
            while self._holds_list_back and service.waits_for_list and not (self._inherited or transport.closed.done()):
                if self._faults.fault != UNLISTED:
                    self._followers.waits(UNLISTED)
                self._faults.warning("runtime does not list its containers yet", UNLISTED)
                still_s = await _first_of(both, 0.0, limit_s)
            # The connection that we were started with is the only one: without Synchronize it still serves.
            if not (self._inherited or transport.closed.done()):
                if fault := self._never_called(ready.done(), still_s, service.request_timeout_s):
                    transport.abort(RemoteProtocolError(fault))
                else:
                    await self._ask_anew(transport)
        except TimeoutError:
            limit_s = self._limits.register_s
            transport.abort(RemoteProtocolError(f"RegisterPlugin not answered within {limit_s:.0f} s"))
        except (RuntimeCallError, ConnectionError) as error:
            transport.abort(RemoteProtocolError(f"registration failed: {fault_of(error)}"))
        reason = await transport.closed
        service.ended()
        synchronize = service.synchronize_facts()
        self._facts = (
            self.facts if synchronize is None or synchronize.whole else SessionFacts(transport.answered, synchronize)
        )
        self._transport = None
        self._plugin.counts.reconnects += not self._stopping
        listed_at = synchronize.began if synchronize else loop.time()
        waited_s = listed_at - service.configured_at if service.configured_at else 0.0
        self._held_back = self._held_back + 1 if waited_s > self._limits.held_back_s else 0
        if service.session.cut_short and not (self._stopping or self._inherited):
            self._cut_short += 1
            if self._cut_short > 1:
                return await self._gave_up(service.session.listing, reason)
        self._ended(reason)
        return 0.0

    async def _stay_away(self) -> None:
        """Let the runtime create containers before we register again, if that had to wait, and being away is safe."""
        if not (self._held_back and self._away_opens_nothing()) or self._stopping:
            return
        logger.bind(fault=PUT_OFF).info("registration put off")
        self._followers.away(PUT_OFF)
        loop, waits_s = asyncio.get_running_loop(), self._limits.held_back_waits_s
        until = loop.time() + waits_s[min(self._held_back, len(waits_s)) - 1]
        # Policy and grants change meanwhile, and each may end it.
        while loop.time() < until and self._away_opens_nothing() and not self._stopping:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _never_called(self, synchronized: bool, still_s: float, timeout_s: float) -> str:
        """Return why the runtime will never call us on this connection, which it keeps open; empty where it will.

        Only a new connection gets out of that. A runtime whose Synchronize timed out neither adds the plugin to its
        list nor closes the connection (seen on containerd 1.7.24), and our late answer looks to us like any other.
        """
        if not synchronized:
            return f"no whole Synchronize within {self._limits.synchronize_s:.0f} s"
        # Never twice on a mere suspicion: where Synchronize always takes so long, no connection would be kept.
        most_s = timeout_s if self._stood_still else timeout_s * STOOD_STILL
        self._stood_still = still_s > most_s
        if self._stood_still:
            return f"nri-gpu stood still for {still_s:.1f} s in Synchronize, and the runtime waits {timeout_s:.1f} s"
        return ""

    async def _ask_anew(self, transport: Transport) -> None:
        """End the connection once, where the runtime's next list may tell that a container is over.

        A second later: containerd lists a container as running from the end of its task to that of its exit's
        handling, and tells us nothing of an exit that it handles while it synchronizes us.
        """
        if self._plugin.unsure:
            await asyncio.wait({transport.closed}, timeout=TOLD_WITHIN_S)
            if self._plugin.unsure and not self._stopping:
                await transport.drain(LEAVE_S, LEAVES_BY if self.validates else (), ConnectionError(LISTED_ANEW))

    async def _register(self, transport: Transport) -> None:
        identity = self._identity()
        payload = register_to_pb(identity.name, identity.index, NRI_VERSION)
        await transport.call("RegisterPlugin", payload, self._limits.register_s)

    def _configured(self, configured: Configured) -> None:
        bound = logger.bind(runtime=configured.runtime, runtime_version=configured.version)
        bound.bind(nri_version=configured.nri_version or "unknown").info("registered")
        if self._inherited and not configured.from_nri_0_7:  # which is when such plugins began to be synchronized
            bound.bind(fault=NEVER_TOLD).warning("launched by a runtime that will not synchronize")
        self._holds_list_back = holds_list_back(configured.runtime, configured.version)
        self._followers.configured(configured)

    def _ended(self, reason: Exception | None) -> None:
        if self._stopping:
            return
        sentence = str(reason) if reason else "the runtime closed the connection"
        if self._inherited and reason is None:
            logger.bind(fault=sentence).info("connection ended, and this plugin with it")
        elif isinstance(reason, LocalProtocolError):
            logger.opt(exception=reason).error("bug: connection to the runtime ended")
        else:
            self._faults.warning("connection ended, reconnecting", sentence, attempt=self._backoff.failures + 1)
        self._followers.away(sentence)

    async def _gave_up(self, listing: ListSize, reason: Exception | None) -> float:
        """Log why Synchronize does not end, again where that changes. Return the seconds to wait."""
        loop = asyncio.get_running_loop()
        began, announced_bytes = loop.time(), reason.length if isinstance(reason, OversizeError) else 0
        sentence = await self._sizes.cut_short(listing, announced_bytes)
        if self._cut_short == 2:
            logger.bind(fault=sentence, attempt=self._cut_short).error("no connection survives Synchronize")
            self._faults.fault = sentence
        self._faults.note("no connection survives Synchronize", sentence)
        self._followers.away(sentence)
        waits_s = self._limits.cut_short_waits_s
        wait_s = waits_s[min(self._cut_short - 2, len(waits_s) - 1)]
        return max(wait_s - (loop.time() - began), FIRST_WAIT_S)

    def _report(self, why: str, fix: str, path: Path) -> None:
        if why != self._faults.fault:
            self._followers.away(f"{why}: {fix}")
        self._faults.warning("runtime not reached, trying again", why, fix=fix, socket=str(path))


async def _first_of(futures: Iterable[asyncio.Future[Exception | None]], began: float, limit_s: float) -> float:
    """Wait until a future is done, for limit_s at most. Return the longest standstill of this process, in seconds.

    A process stands still when it is stopped (SIGSTOP, a frozen cgroup), starved of CPU or swapped out. began: when it
    was seen to run, by the loop's clock; 0: now.
    """
    loop, longest_s = asyncio.get_running_loop(), 0.0
    deadline, seen = loop.time() + limit_s, began or loop.time()
    while (now := loop.time()) < deadline:
        done, _ = await asyncio.wait(futures, timeout=min(LOOK_S, deadline - now), return_when=asyncio.FIRST_COMPLETED)
        longest_s, seen = max(longest_s, loop.time() - seen - LOOK_S), loop.time()
        if done:
            break
    return longest_s


def explain(error: OSError, path: Path, runtime_sockets: Iterable[Path] = RUNTIME_SOCKETS) -> tuple[str, str]:
    """Return why there is no connection to the socket, and what to do about that.

    runtime_sockets: any of them that is there shows that containerd runs.
    """
    if error.errno == errno.ENOENT:
        runtime = next((str(sock) for sock in runtime_sockets if sock.exists()), "")
        if runtime:
            return (
                f"containerd runs ({runtime}) but there is no NRI socket {path}: NRI is off, as by default before "
                "containerd 2.0",
                'set disable = false under [plugins."io.containerd.nri.v1.nri"] in /etc/containerd/config.toml and '
                "restart containerd (`nri-gpu doctor` prints the commands); containerd older than 1.7 has no NRI",
            )
        fix = "start containerd, or set plugin.socket in the policy to its NRI socket"
        return f"no NRI socket {path}: containerd is not running, or listens elsewhere", fix
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to connect to {path}", "nri-gpu has to run as root"
    if error.errno == errno.ECONNREFUSED:
        return f"nobody listens on {path}: it was left behind by a runtime that has stopped", "start the runtime"
    return f"cannot connect to {path}: {cause_of(error)}", "set plugin.socket in the policy to the runtime's NRI socket"


async def _socket_appears(path: Path) -> None:
    from nri_gpu.system.folder_watch import folder_changed  # brings ctypes: only where there is no socket

    await folder_changed(path.parent, WAIT_MAX_S)
