"""One NRI session, from connect to close, as a table. Pure: knows no socket and no clock.

    REGISTERING -> CONFIGURED -> (SYNCHRONIZING ->) READY -> CLOSED

Configure may overtake the reply to RegisterPlugin, so that reply moves nothing. A plugin that containerd 1.7 started
itself never gets Synchronize; its events arrive in CONFIGURED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri.convert import Listed, Parts
from nri_gpu.nri.list_size import Listing


class Phase(StrEnum):
    """Where a session is."""

    REGISTERING = "registering"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    READY = "ready"
    CLOSED = "closed"


class Step(StrEnum):
    """What can happen to it."""

    CONFIGURE = "Configure"
    PART = "Synchronize, more to come"
    LAST = "Synchronize"
    EVENT = "event"
    CLOSE = "close"


TRANSITIONS: Final[Mapping[Phase, Mapping[Step, Phase]]] = {
    Phase.REGISTERING: {Step.CONFIGURE: Phase.CONFIGURED, Step.CLOSE: Phase.CLOSED},
    Phase.CONFIGURED: {
        Step.PART: Phase.SYNCHRONIZING,
        Step.LAST: Phase.READY,
        Step.EVENT: Phase.CONFIGURED,
        Step.CLOSE: Phase.CLOSED,
    },
    Phase.SYNCHRONIZING: {Step.PART: Phase.SYNCHRONIZING, Step.LAST: Phase.READY, Step.CLOSE: Phase.CLOSED},
    Phase.READY: {Step.EVENT: Phase.READY, Step.CLOSE: Phase.CLOSED},
    Phase.CLOSED: {Step.CLOSE: Phase.CLOSED},
}


class Session:
    """The state of one connection, and the parts of its Synchronize so far. stage_dir: as of `Parts`."""

    def __init__(self, stage_dir: str = "") -> None:
        self.phase = Phase.REGISTERING
        self._parts = Parts(stage_dir)

    @property
    def listing(self) -> Listing:
        """What the parts of Synchronize so far weigh."""
        return self._parts.listing

    @property
    def cut_short(self) -> bool:
        """Whether, ended now, it ends between Configure and the end of Synchronize."""
        return self.phase in (Phase.CONFIGURED, Phase.SYNCHRONIZING)

    def step(self, step: Step) -> None:
        """Move on. Raises: RemoteProtocolError when the runtime may not do that now."""
        self.phase = self._check(step)

    def synchronize(self, payload: bytes) -> tuple[Listed, ...] | None:
        """Take one part; all of it after the last, None while more is to come.

        An empty part is no end: some runtimes send thousands of them (containerd/nri pkg/adaptation/plugin.go).
        Raises: RemoteProtocolError when the runtime may not do that now; nothing of the part is kept then.
        """
        self._check(Step.LAST)  # more or not: both may come in the same phases
        more = self._parts.add(payload)
        self.step(Step.PART if more else Step.LAST)
        return None if more else self._parts.listed()

    def _check(self, step: Step) -> Phase:
        after = TRANSITIONS[self.phase].get(step)
        if after is None:
            raise RemoteProtocolError(f"{step} came while the session was {self.phase}")
        return after
