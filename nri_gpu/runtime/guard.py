"""The guard: a plugin that grants nothing and only says no. It judges by what the runtime shows it.

Its whole work is done where a container asked for GPUs; every other one costs it a search for a few byte strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from nri_gpu.allocation.mark import MARK_KEY, BadMark, Mark
from nri_gpu.asking import may_ask_by_environment, needs_grant
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.judge import judge_adjusted, judge_start, mark_of
from nri_gpu.log import logger
from nri_gpu.nri import convert, validation
from nri_gpu.nri.convert import EMPTY, Lifecycle, Listed
from nri_gpu.nri.status import status_of
from nri_gpu.nri.subscribe import Event
from nri_gpu.policy.broken import BrokenPolicy
from nri_gpu.policy.model import Policy
from nri_gpu.wire.status import Status

if TYPE_CHECKING:
    from nri_gpu.log import Logger

Reply = bytes | Status
EVENTS: Final = (Event.START_CONTAINER, Event.VALIDATE_CONTAINER_ADJUSTMENT)
# Runtimes that heed an error answered to START_CONTAINER. CRI-O logs it and goes on (server/container_start.go), Docker
# sends none: there the creation is judged too, where a plugin behind the injector sees the mark already. It costs a
# round trip for every container, so not where it would only refuse what will not start anyway.
HEED_STARTS: Final = frozenset({"containerd"})


class State(Protocol):
    """What is read of the daemon's state folder."""

    def key(self) -> bytes | None:
        """The marks' key as it is now; None: there is none, so no mark can be valid."""

    def policy(self) -> Policy | BrokenPolicy:
        """The policy that the daemon serves by."""


class Found(Struct, frozen=True):
    """Containers that ask and hold no grant, as the runtime listed them at Synchronize.

    running: nobody ever decided on them. doubtful: they run, with a mark that does not hold. waiting: created and not
    started, and they will not be.
    """

    running: tuple[Container, ...] = ()
    doubtful: tuple[Container, ...] = ()
    waiting: tuple[Container, ...] = ()


class Guard:
    """Judges for one runtime. found: as of the last Synchronize. later: run once the reply is on its way.

    runtime: its name, as it told before it asked for `events`.
    """

    stage_dir = ""  # it lets nothing go

    def __init__(self, state: State, later: Callable[[Callable[[], None]], object]) -> None:
        self.found = Found()
        self.runtime = ""
        self._state = state
        self._later = later

    @property
    def events(self) -> tuple[Event, ...]:
        """What it must hear of."""
        return EVENTS if self.runtime in HEED_STARTS else (*EVENTS, Event.CREATE_CONTAINER)

    def unanswered(self, payload: bytes) -> None:
        """Nothing was promised."""

    def create_container(self, payload: bytes) -> Reply:
        """CreateContainer, as the plugins before this one left it."""
        return self._judge(convert.request_from_pb(payload), "container refused") if self._asks(payload) else EMPTY

    def validate(self, payload: bytes) -> Reply:
        """ValidateContainerAdjustment: no creation without a grant, nor with GPU nodes that no grant names."""
        if not validation.concerns_us(payload) and not self._asks(payload):
            return EMPTY
        adjusted = validation.adjusted_from_pb(payload, MARK_KEY)
        reason = judge_adjusted(adjusted, self._state.key(), self._state.policy())
        if reason:
            self._log(adjusted.container, reason, "container rejected")
        return validation.verdict_to_pb(reason)

    def lifecycle(self, event: int, payload: bytes) -> Reply:
        """An event by its own RPC."""
        if event != Event.START_CONTAINER or not self._asks(payload):
            return EMPTY
        return self._start(convert.event_from_pb(event, payload))

    def state_change(self, payload: bytes) -> Reply:
        """An event by StateChange."""
        if not self._asks(payload):
            return EMPTY
        change = convert.state_change_from_pb(payload)
        return self._start(change) if change.event == Event.START_CONTAINER else EMPTY

    def synchronized(self, listed: tuple[Listed, ...]) -> None:
        """What happened while nobody looked: it is reported, and `found` for whoever stops it."""
        key, policy = self._state.key(), self._state.policy()
        running: list[Container] = []
        doubtful: list[Container] = []
        waiting: list[Container] = []
        for item in listed:
            mark = _mark(item.container, key)
            if isinstance(mark, Mark) or not needs_grant(item.container, policy):
                continue
            (waiting if item.created else doubtful if isinstance(mark, BadMark) else running).append(item.container)
            _report(item, mark)
        self.found = Found(tuple(running), tuple(doubtful), tuple(waiting))

    def _asks(self, payload: bytes) -> bool:
        """Whether it may ask: by annotation; by environment, which every CUDA image has, where policy lets anybody."""
        if convert.PREFIX.encode() in payload:
            return True
        return convert.VISIBLE_NEEDLE in payload and may_ask_by_environment(self._state.policy())

    def _start(self, change: Lifecycle) -> Reply:
        return self._judge(change.container, "start refused") if change.container else EMPTY

    def _judge(self, container: Container, phrase: str) -> Reply:
        mark = _mark(container, self._state.key())
        if isinstance(mark, Mark):  # the policy is read for the others only
            return EMPTY
        reason = judge_start(container, mark, self._state.policy())
        if reason is None:
            return EMPTY
        self._log(container, reason, phrase)
        return status_of(reason)

    def _log(self, container: Container, reason: Reason, phrase: str) -> None:
        bound = _bound(container).bind(decision="refuse", code=reason.code.value, reason=reason.sentence)
        self._later(lambda: bound.info(phrase))


def _mark(container: Container, key: bytes | None) -> Mark | BadMark | None:
    return mark_of(container, container.annotations.get(MARK_KEY), key)


def _report(item: Listed, mark: BadMark | None) -> None:
    bound = _bound(item.container)
    if item.created:
        bound.info("container asked for GPUs and holds no grant: it will not start")
    elif mark:
        bound.bind(fault=mark.why).warning("container runs with a grant that does not hold")
    else:
        bound.warning("container runs without the GPUs it asked for")


def _bound(container: Container) -> Logger:
    pod = container.pod
    return logger.bind(
        namespace=pod.namespace,
        pod_name=pod.name,
        container_name=container.name,
        pod_uid=pod.uid,
        container_id=container.id,
    )
