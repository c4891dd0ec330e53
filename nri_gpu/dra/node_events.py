"""Events on the Node: a GPU cannot be granted any more or can again, a claim was not prepared, another driver runs.

They are of events.k8s.io/v1, which a kubelet's credentials may write too: `kubectl describe node` shows them, and an
event that repeats is one event with a series. All who may read the namespace `default` see them, so their text is ours
alone: it names no pod, no namespace and no claim.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Final

from msgspec import Struct

from nri_gpu.domain.decision import Code
from nri_gpu.domain.health import HealthState
from nri_gpu.domain.text import shown
from nri_gpu.dra.api_server import (
    ApiServer,
    ApiServerError,
    ConflictError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from nri_gpu.dra.claim_object import ResourceClaimError
from nri_gpu.dra.preparation import PreparationError
from nri_gpu.dra.questions import GpuCondition, NodeView
from nri_gpu.system.tasks import Backoff, LogOnce

CONTROLLER: Final = "nri-gpu"  # the events' reportingController; the chart's policy lets us write no other
NAMESPACE: Final = "default"  # where events of Nodes are
HOUR_S: Final = 3600.0  # for which an API server keeps events, unless it is told otherwise
HOURLY_MAX: Final = 10  # events of one kind about one GPU
QUEUED_MAX: Final = 100  # events that wait for an API server; the oldest go
NOTE_MAX: Final = 900  # characters; the API server takes 1,024 bytes
INSTANCE_MAX: Final = 128  # characters, by the API server
GONE: Final = "gone"


class EventReason(StrEnum):
    """The kinds of events."""

    GPU_UNAVAILABLE = "GPUUnavailable"
    GPU_AVAILABLE = "GPUAvailable"
    CLAIM_NOT_PREPARED = "ClaimNotPrepared"
    DRIVER_CHANGED = "NVIDIADriverChanged"


# Type and action of each, as events.k8s.io/v1 wants them.
KINDS: Final = {
    EventReason.GPU_UNAVAILABLE: ("Warning", "Withhold"),
    EventReason.GPU_AVAILABLE: ("Normal", "Offer"),
    EventReason.CLAIM_NOT_PREPARED: ("Warning", "Prepare"),
    EventReason.DRIVER_CHANGED: ("Normal", "Observe"),
}


class Notice(Struct, frozen=True):
    """An event that is to be written. subject: the GPU's UUID, else a refusal's code, or empty for the node."""

    reason: EventReason
    note: str
    at_s: float  # seconds since the epoch
    subject: str = ""


class HourlyLimit:
    """The limit of events: so many of one kind about one subject within any hour."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], deque[float]] = {}

    def allows(self, kind: str, subject: str, now: float) -> bool:
        """Return whether one more may be written now, and count it. now: on a clock that never goes back; seconds."""
        times = self._times.setdefault((kind, subject), deque(maxlen=HOURLY_MAX))
        if len(times) == HOURLY_MAX and now - times[0] < HOUR_S:
            return False
        times.append(now)
        return True


def notices(before: NodeView | None, view: NodeView, now_s: float) -> Iterator[Notice]:
    """Yield what changed since the view before, or, where there was none, what became unavailable within the hour."""
    was = {gpu.uuid: gpu for gpu in (before.gpus or () if before else ())}
    there = {gpu.uuid: gpu for gpu in view.gpus or ()}
    for uuid, gpu in there.items():
        old = was[uuid].withheld if uuid in was else GONE if before else ""
        # A GPU that recovers is still withheld, and was said to be.
        if gpu.withheld not in (old, HealthState.RECOVERING):
            at_s = gpu.since_s if gpu.withheld else now_s
            if before or (at_s is not None and 0 <= now_s - at_s < HOUR_S):
                yield _of_gpu(gpu, now_s if at_s is None else at_s)
    for uuid in was.keys() - there.keys():
        note = f"{_name(was[uuid])} is gone: NVML does not list it any more"
        yield Notice(EventReason.GPU_UNAVAILABLE, note, now_s, uuid)
    old, new = before.driver_version if before else "", view.driver_version
    if old and new and old != new:
        yield Notice(EventReason.DRIVER_CHANGED, f"the NVIDIA driver changed from {old} to {new}", now_s)


def _of_gpu(gpu: GpuCondition, at_s: float) -> Notice:
    if not gpu.withheld:
        return Notice(EventReason.GPU_AVAILABLE, f"{_name(gpu)} can be granted again", at_s, gpu.uuid)
    note = f"{_name(gpu)} is {gpu.withheld}, and granted to no new container: {gpu.why}"
    return Notice(EventReason.GPU_UNAVAILABLE, note, at_s, gpu.uuid)


def _name(gpu: GpuCondition) -> str:
    return f"GPU {gpu.index} ({gpu.uuid})"


class _Written(Struct, frozen=True):
    """An event that is on the API server. count: how often it happened. at_s: when it last did."""

    name: str
    count: int
    at_s: float


class NodeEvents:
    """The writer of events, for the life of the driver process. It delays nobody, and what it cannot write it drops.

    node: its name in Kubernetes. clock: of the limit. first_wait_s, longest_wait_s: between two attempts.
    """

    def __init__(
        self,
        api: ApiServer,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_wait_s: float = 2.0,
        longest_wait_s: float = 60.0,
    ) -> None:
        self._api = api
        self._node = node
        self._clock = clock
        self._waits = Backoff(first_wait_s, longest_wait_s, jitter=1.0)
        self._view: NodeView | None = None  # the last that knew the GPUs
        self._queue: deque[Notice] = deque(maxlen=QUEUED_MAX)
        self._late: dict[str, Notice] = {}  # the newest state of each subject that is over the limit
        self._limit = HourlyLimit()
        self._written: dict[tuple[str, str], _Written] = {}  # by reason and note
        self._woken = asyncio.Event()
        self._log = LogOnce()

    def put(self, view: NodeView) -> None:
        """Take the daemon's view of the GPUs, once it knows them."""
        if view.gpus is not None:
            before, self._view = self._view, view
            for notice in (*self._late.values(), *notices(before, view, time.time())):
                self._add(notice)

    def claim_failed(self, error: Exception) -> None:
        """Take why a claim was not prepared. The pod's own event has the sentence; here are only the code and the GPU.

        A claim that is no more is no failure.
        """
        code, uuid = Code.NODE_NOT_READY.value, ""
        match error:
            case ResourceClaimError(over=True):
                return
            case ResourceClaimError():
                code = Code.BAD_REQUEST.value
            case PreparationError():
                code, uuid = error.code, error.uuid
        note = f"a ResourceClaim was not prepared ({f'{code}, {uuid}' if uuid else code}): its pod's events say why"
        self._add(Notice(EventReason.CLAIM_NOT_PREPARED, note, time.time(), uuid or code))

    async def run(self) -> None:
        """Write until cancelled, whatever happens to the API server."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._queue:
                await self._settle(self._queue.popleft())

    def _add(self, notice: Notice) -> None:
        """Queue a notice. Over the limit, the newest state of its subject is kept for one of the next views."""
        is_state = notice.reason is not EventReason.CLAIM_NOT_PREPARED
        if is_state:
            self._late.pop(notice.subject, None)
        if self._limit.allows(notice.reason, notice.subject, self._clock()):
            self._queue.append(notice)
            self._woken.set()
        elif is_state:
            self._late[notice.subject] = notice

    async def _settle(self, notice: Notice) -> None:
        """Write, again while the API server is away; what it refuses is said once, and dropped."""
        while True:
            try:
                await self._write(notice)
                self._log.clear()
                break
            except (UnavailableError, UnauthorizedError) as error:
                self._complain(error)
                after_s = error.retry_after_s if isinstance(error, UnavailableError) else 0.0
                await asyncio.sleep(after_s + self._waits.next_s())
            except ApiServerError as error:
                self._complain(error)
                break
        self._waits.reset()

    def _complain(self, error: ApiServerError) -> None:
        self._log.note("events of the Node not written", str(error))

    async def _write(self, notice: Notice) -> None:
        """Create an event, or count it where the same happened within the hour. Raises: ApiServerError."""
        key, last_s = (notice.reason.value, notice.note), notice.at_s - HOUR_S
        self._written = {each: event for each, event in self._written.items() if event.at_s > last_s}
        if event := self._written.get(key):
            with suppress(NotFoundError):  # somebody deleted it, or this server keeps events for less than an hour
                self._written[key] = await self._count(event, notice.at_s)
                return
        name = self._event_name(notice)
        with suppress(ConflictError):  # the driver process before this one wrote it
            await self._api.create_event(NAMESPACE, await self._event(name, notice))
        self._written[key] = _Written(name, 1, notice.at_s)

    async def _count(self, event: _Written, at_s: float) -> _Written:
        again = _Written(event.name, event.count + 1, at_s)
        series = {"count": again.count, "lastObservedTime": _micro_time(at_s)}
        await self._api.patch_event(NAMESPACE, again.name, {"series": series})
        return again

    def _event_name(self, notice: Notice) -> str:
        """Return a name that the same event gets from the next driver process, too."""
        text = f"{notice.reason}\n{notice.subject}\n{notice.note}\n{notice.at_s:.3f}"
        return f"{self._node}.{sha256(text.encode()).hexdigest()[:16]}"

    async def _event(self, name: str, notice: Notice) -> dict[str, object]:
        kind, action = KINDS[notice.reason]
        uid = await self._api.node_uid(self._node)
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "eventTime": _micro_time(notice.at_s),
            "reportingController": CONTROLLER,
            "reportingInstance": self._node[:INSTANCE_MAX],
            "action": action,
            "reason": notice.reason.value,
            "note": shown(notice.note, NOTE_MAX),
            "type": kind,
            "regarding": {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": uid},
        }


def _micro_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
