"""The way from a request to its answer: the table of methods, the deadline, and the status of each failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, Protocol

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.errors import RemoteProtocolError, TooManyEntriesError
from nri_gpu.nri import codes, convert, validation
from nri_gpu.nri.codes import Reply, status_of
from nri_gpu.nri.convert import EMPTY, Configured, DecodeError
from nri_gpu.nri.list_size import event_of
from nri_gpu.nri.session import Listed, Phase, Session, Step
from nri_gpu.nri.subscription import Event, Subscription
from nri_gpu.plugin.counts import Counts, Failure, Outcome
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.ttrpc.frames import RequestReceived, ResponseSent, Status

Handler = Callable[[bytes], Reply]

PLUGIN: Final = "nri.pkg.api.v1alpha1.Plugin"
CREATE: Final = "CreateContainer"
# Our deadline is this much before the runtime's: a late answer is worse than a refusal, because the runtime then drops
# us and starts the container without its GPUs.
MARGIN_NS: Final = 100_000_000
REQUEST_TIMEOUT_S: Final = 2.0  # the runtime's, where Configure does not name it (below NRI 0.7)
# RPCs of one event each: StopContainer always, all of them from NRI 0.12. Older runtimes send StateChange instead.
EVENT_METHODS: Final = {
    "RunPodSandbox": Event.RUN_POD_SANDBOX,
    "PostUpdatePodSandbox": Event.POST_UPDATE_POD_SANDBOX,
    "StopPodSandbox": Event.STOP_POD_SANDBOX,
    "RemovePodSandbox": Event.REMOVE_POD_SANDBOX,
    "PostCreateContainer": Event.POST_CREATE_CONTAINER,
    "StartContainer": Event.START_CONTAINER,
    "PostStartContainer": Event.POST_START_CONTAINER,
    "PostUpdateContainer": Event.POST_UPDATE_CONTAINER,
    "StopContainer": Event.STOP_CONTAINER,
    "RemoveContainer": Event.REMOVE_CONTAINER,
}
# After these the runtime no longer lists a container, or a pod.
ENDS: Final = frozenset({Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.REMOVE_POD_SANDBOX})
# Requests that we do not subscribe to, and answer all the same: an error would fail a container or an update.
UNUSED_METHODS: Final = ("UpdateContainer", "UpdatePodSandbox")


class SynchronizeFacts(Struct, frozen=True):
    """The facts of a Synchronize."""

    began: float  # by the monotonic clock, seconds
    took_s: float
    parts: int
    size_bytes: int
    objects: int  # pods and containers
    whole: bool  # received to its end


class NriHandlers(Protocol):
    """The handlers that answer requests: the injector's (`plugin/handlers.py`) or the guard's (`plugin/guard.py`)."""

    stage_dir: str  # where driver files are staged, if mounts from there have to be read; else empty
    same_pids: bool  # set for each connection: whether the runtime's PIDs are those of this process's namespace
    counts: Counts

    @property
    def events(self) -> Collection[Event]:
        """Return the events to subscribe to, where the runtime knows them."""

    @property
    def unsure(self) -> bool:
        """Return whether the last Synchronize left a question open that another Synchronize answers."""

    def create_container(self, payload: bytes) -> Reply:
        """Answer CreateContainer."""

    def unanswered(self, payload: bytes) -> None:
        """Take note that no byte of the answer to a CreateContainer was sent."""

    def validate(self, payload: bytes) -> Reply:
        """Answer ValidateContainerAdjustment."""

    def lifecycle(self, payload: bytes, event: int = 0) -> Reply:
        """Answer an event that came by its own RPC. event 0: it came by StateChange."""

    def synchronized(self, listed: tuple[Listed, ...], request_timeout_s: float) -> None:
        """Take all that the runtime has, before any event. request_timeout_s: for how long it waits for an answer."""


class PluginService:
    """The service `nri.pkg.api.v1alpha1.Plugin` on one connection.

    configured: called with the runtime's introduction. ready: called at the end of Synchronize.
    Handlers are plain functions on values in memory: they cannot hang, so the deadline is checked before one runs,
    never during.
    """

    def __init__(
        self,
        plugin: NriHandlers,
        configured: Callable[[Configured], None],
        ready: Callable[[], None],
        sizes: Sizes,
        subscription: Subscription | None = None,
    ) -> None:
        self.session = Session(plugin.stage_dir)
        self._sizes = sizes
        self._subscription = subscription or Subscription()
        self._plugin = plugin
        self._counts = plugin.counts
        self._configured = configured
        self._ready = ready
        self._parts = self._payload_bytes = 0  # of Synchronize so far
        self._began = 0.0
        self.configured_at = 0.0  # of the monotonic clock
        self._request_timeout_ns = 0  # from Configure, for a request without a timeout of its own; 0: no timeout
        self._handlers: dict[str, Handler] = {
            **dict.fromkeys(UNUSED_METHODS, lambda _: EMPTY),
            **{method: partial(self._event, event=event) for method, event in EVENT_METHODS.items()},
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            CREATE: self._create,
            "ValidateContainerAdjustment": self._validate,
            "StateChange": self._event,
            "Shutdown": self._shutdown,
        }

    @property
    def request_timeout_s(self) -> float:
        """Return for how long the runtime waits for an answer."""
        return self._request_timeout_ns / 1e9 or REQUEST_TIMEOUT_S

    def answer(self, request: RequestReceived, waited_ns: int = 0) -> ResponseSent:
        """Answer one request. waited_ns: how long ago its bytes were read. Never raises."""
        began_ns = time.perf_counter_ns()
        outcome = self._outcome(request, waited_ns)
        if request.method == CREATE:
            self._counts.create.add(waited_ns + time.perf_counter_ns() - began_ns)
        if isinstance(outcome, Status):
            return ResponseSent(request.stream_id, status=outcome)
        return ResponseSent(request.stream_id, outcome)

    def _outcome(self, request: RequestReceived, waited_ns: int) -> Reply:
        handler = self._handlers.get(request.method) if request.service == PLUGIN else None
        if handler is None:
            return codes.unknown_method(request.service, request.method, PLUGIN)
        if _late(request.timeout_ns or self._request_timeout_ns, waited_ns):
            return self._failed(request, Failure.LATE, codes.LATE)
        try:
            return handler(request.payload)
        except DecodeError:
            return self._failed(request, Failure.MALFORMED, codes.MALFORMED)
        except TooManyEntriesError as error:
            return self._failed(request, Failure.TOO_LARGE, status_of(Reason(Code.REQUEST_TOO_LARGE, str(error))))
        except RemoteProtocolError as error:
            return self._failed(request, Failure.OUT_OF_ORDER, codes.out_of_order(str(error)))
        except Exception:  # for every handler: without an answer, the runtime would start containers without us
            self._counts.failures[Failure.BUG] += 1
            bound = logger.bind(method=request.method, stream_id=request.stream_id)
            bound.opt(exception=True).error("bug in a handler")
            return codes.INTERNAL

    def _failed(self, request: RequestReceived, why: Failure, outcome: Status) -> Status:
        self._counts.failures[why] += 1
        bound = logger.bind(method=request.method, stream_id=request.stream_id)
        bound.bind(deadline_ms=request.timeout_ns / 1e6, reason=outcome.message).warning("request failed")
        return outcome

    def _create(self, payload: bytes) -> Reply:
        self.session.step(Step.EVENT)
        if reason := self._sizes.refusal(payload):
            self._counts.refused(reason.code)
            return status_of(reason)
        reply = self._plugin.create_container(payload)
        if isinstance(reply, bytes):
            self._sizes.created(payload, added_bytes=len(reply))
        return reply

    def _validate(self, payload: bytes) -> Reply:
        self.session.step(Step.EVENT)
        reason = self._sizes.start_refusal(payload)
        if reason is None:
            return self._plugin.validate(payload)
        self._counts.refused(reason.code, Outcome.REJECTED)
        return validation.verdict_to_pb(reason)

    def _event(self, payload: bytes, event: int = 0) -> Reply:
        self.session.step(Step.EVENT)
        reason = self._measured(event or event_of(payload), payload)
        if reason is None:
            return self._plugin.lifecycle(payload, event)
        self._counts.refused(reason.code, Outcome.START_REFUSED)
        return status_of(reason)

    def _measured(self, event: int, payload: bytes) -> Reason | None:
        """Count what an event adds to the runtime's list or removes. Return a refusal if it adds too much, or None."""
        if event == Event.START_CONTAINER:
            return self._sizes.start_refusal(payload)
        if event == Event.RUN_POD_SANDBOX:
            if reason := self._sizes.refusal(payload):
                return reason
            self._sizes.created(payload)
        elif event in ENDS:
            self._sizes.ended(payload, event)
        return None

    def _configure(self, payload: bytes) -> bytes:
        configured = convert.configured_from_pb(payload)
        self.session.step(Step.CONFIGURE)
        self.configured_at = time.monotonic()
        self._request_timeout_ns = configured.request_timeout_ms * 1_000_000
        self._sizes.configured(configured)
        self._configured(configured)
        asked = self._subscription.mask(
            self._plugin.events, configured.runtime, configured.version, configured.nri_version
        )
        return convert.configured_to_pb(asked)

    def _synchronize(self, payload: bytes) -> bytes:
        self._began = self._began or time.monotonic()
        listed = self.session.synchronize(payload)
        self._parts += 1
        self._payload_bytes += len(payload)
        if listed is None:
            return convert.synchronize_to_pb(more=True)
        # Once, not for each part: some runtimes send thousands of empty parts (nri/session.py).
        logger.bind(parts=self._parts, payload_bytes=self._payload_bytes).debug("synchronized")
        self._sizes.synchronized(self.session.listing)
        self._plugin.synchronized(listed, self.request_timeout_s)
        self._ready()
        return convert.synchronize_to_pb(more=False)

    @property
    def waits_for_list(self) -> bool:
        """Return whether the runtime took us, and has not begun to list its containers."""
        return self.session.phase is Phase.CONFIGURED

    def synchronize_facts(self) -> SynchronizeFacts | None:
        """Return the facts of this connection's Synchronize so far; None before its first part."""
        if not self._began:
            return None
        return SynchronizeFacts(
            began=self._began,
            took_s=time.monotonic() - self._began,
            parts=self._parts,
            size_bytes=self._payload_bytes,
            objects=len(self.session.listing),
            whole=self.session.phase is Phase.READY,
        )

    def _shutdown(self, payload: bytes) -> Reply:
        """Answer Shutdown, and do nothing: only the end of the connection counts. No released runtime calls it."""
        del payload
        logger.info("runtime asked nri-gpu to shut down")
        return EMPTY

    def unsent(self, request: RequestReceived) -> None:
        """Tell the plugin of a CreateContainer whose answer was not sent: too large, or the connection had ended."""
        if request.method == CREATE:
            self._plugin.unanswered(request.payload)

    def ended(self) -> None:
        """Tell the subscription that the connection is closed."""
        self._subscription.ended(after_configure=self.session.phase is Phase.CONFIGURED)


def _late(timeout_ns: int, waited_ns: int) -> bool:
    """Return whether the answer would be late. timeout_ns: 0 is none, negative is already over (ttrpc: server.go)."""
    return timeout_ns < 0 or (timeout_ns > 0 and waited_ns > max(timeout_ns - MARGIN_NS, timeout_ns // 2))
