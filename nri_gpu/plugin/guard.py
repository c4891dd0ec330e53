"""The guard, which refuses containers that asked for GPUs and carry no valid grant, whatever became of the daemon.

Of the daemon it knows what is in the state folder (`plugin/guard_state.py`): the key, the policy and the journal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from loguru import logger
from msgspec import Struct, field

from nri_gpu.decision.asked import may_ask_by_environment, needs_grant
from nri_gpu.decision.start_check import (
    TAKEN,
    grant_of,
    validate_adjusted,
    validate_nodes,
    validate_restored,
    validate_start,
)
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant
from nri_gpu.nri import convert, validation
from nri_gpu.nri.codes import Reply, status_of
from nri_gpu.nri.convert import EMPTY
from nri_gpu.nri.list_size import event_of
from nri_gpu.nri.session import Listed
from nri_gpu.nri.subscription import HEED_STARTS, Event, Lifecycle
from nri_gpu.plugin.counts import Counts
from nri_gpu.plugin.decision_log import container_fields, log_refusal, log_revoked
from nri_gpu.policy.model import Policy

EVENTS: Final = (Event.START_CONTAINER, Event.VALIDATE_CONTAINER_ADJUSTMENT)
# A containerd of this line restores checkpoints, of whose start it tells nobody, and does not ask for validation yet.
_RESTORES: Final = re.compile(r"v?2\.1\b")


class GuardState(Protocol):
    """The facts that the guard reads in the daemon's state folder."""

    def key(self) -> bytes | None:
        """Return the key that grants are signed with; None where there is no key, so that no grant is valid."""

    def policy(self) -> Policy:
        """Return the daemon's policy."""

    def revoked(self) -> Collection[ContainerId]:
        """Return the containers whose GPUs were granted to another container before they started.

        Raises: OSError: nobody can tell.
        """


class Found(Struct):
    """Containers that asked and have no valid grant, as the runtime listed them at Synchronize."""

    running: list[Container] = field(default_factory=list)  # without any grant
    doubtful: list[Container] = field(default_factory=list)  # running, with a grant that is not valid
    waiting: list[Container] = field(default_factory=list)  # created and not started, and never will be
    revoked: list[Container] = field(default_factory=list)  # running on GPUs that another pod was granted since


class Guard:
    """The guard of one runtime. later: runs something once the reply is on its way."""

    stage_dir = ""  # what containers have mounted does not matter here
    same_pids = False
    unsure = False

    def __init__(self, state: GuardState, later: Callable[[Callable[[], None]], object]) -> None:
        self.found = Found()  # by the last Synchronize
        self.counts = Counts()
        self.runtime = self.version = ""  # as it calls itself; set before `events` is read
        self._state = state
        self._later = later

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the events to subscribe to.

        Where starts cannot be refused, creations are validated too, because a plugin behind the injector sees the
        grant. That costs a round trip for every container, so it is not done where it would only refuse what will not
        start anyway.
        """
        if self.runtime in HEED_STARTS and not _RESTORES.match(self.version):
            return EVENTS
        return (*EVENTS, Event.CREATE_CONTAINER)

    def unanswered(self, payload: bytes) -> None:
        """Do nothing: the guard granted nothing."""

    def create_container(self, payload: bytes) -> Reply:
        """Answer CreateContainer, by the container as the plugins before this one left it."""
        if not self._asks(payload):
            return EMPTY
        container = convert.request_from_pb(payload)
        if reason := validate_restored(container, self._state.policy()):
            self._log(container, reason, "container refused")
            return status_of(reason)
        return EMPTY if self.runtime in HEED_STARTS else self._validate_grant(container, "container refused")

    def validate(self, payload: bytes) -> Reply:
        """Answer ValidateContainerAdjustment: no creation without a grant, nor with GPU nodes that no grant names."""
        if not validation.concerns_us(payload) and not self._asks(payload):
            return EMPTY
        adjusted = validation.adjusted_from_pb(payload, GRANT_KEY)
        reason = validate_adjusted(adjusted, self._state.key(), self._state.policy())
        if reason:
            self._log(adjusted.container, reason, "container rejected")
        return validation.verdict_to_pb(reason)

    def lifecycle(self, payload: bytes, event: int = 0) -> Reply:
        """Answer an event that came by its own RPC, or by StateChange."""
        if not self._asks(payload) or (event or event_of(payload)) != Event.START_CONTAINER:
            return EMPTY
        container = Lifecycle(payload, event).container
        return self._validate_grant(container, "start refused", starts=True) if container else EMPTY

    def _validate_granted(self, container: Container, grant: SignedGrant) -> Reason | None:
        try:
            if container.id in self._state.revoked():
                return TAKEN
        except OSError as error:
            sentence = (
                "the journal in the state folder, which says whose GPUs went to another container, cannot be read "
                f"({fault_of(error)}): fix that, and start the container again."
            )
            return Reason(Code.NODE_NOT_READY, sentence)
        return validate_nodes(container, grant) if self.runtime in HEED_STARTS else None

    def synchronized(self, listed: tuple[Listed, ...], request_timeout_s: float = 0.0) -> None:
        """Log which containers were created without a grant while nobody was connected, and keep them in `found`."""
        key, policy = self._state.key(), self._state.policy()
        self.found = Found()
        granted: list[tuple[Listed, SignedGrant]] = []
        for item in listed:
            container, grant = item.container, _grant(item.container, key)
            if isinstance(grant, SignedGrant):
                granted.append((item, grant))
            if isinstance(grant, SignedGrant) or not needs_grant(container, policy):
                continue
            bound = logger.bind(**container_fields(container))
            if item.created:
                self.found.waiting.append(container)
                bound.info("container asked for GPUs and holds no grant: it will not start")
            elif grant:
                self.found.doubtful.append(container)
                bound.bind(fault=grant.why).warning("container runs with a grant that is not valid")
            else:
                self.found.running.append(container)
                bound.warning("container runs without the GPUs it asked for")
        self._find_revoked(granted)

    def _find_revoked(self, granted: Sequence[tuple[Listed, SignedGrant]]) -> None:
        """Find containers that the journal names as revoked, and that run on GPUs which another pod holds now."""
        try:
            revoked = self._state.revoked()
        except OSError:  # then no container with a grant may start, and the log says why
            return
        running = [(each.container, its) for each, its in granted if not each.created]
        for container, grant in (each for each in running if each[0].id in revoked):
            others = {other.pod.full_name for other, its in running if _is_against(container, grant, other, its)}
            if others:
                self.found.revoked.append(container)
                log_revoked(container_fields(container), grant.uuids, others)

    def _asks(self, payload: bytes) -> bool:
        return convert.may_ask(payload, lambda: may_ask_by_environment(self._state.policy()))

    def _validate_grant(self, container: Container, phrase: str, *, starts: bool = False) -> Reply:
        grant = _grant(container, self._state.key())
        if isinstance(grant, SignedGrant):  # the policy is read only for other containers
            reason = self._validate_granted(container, grant) if starts else None
        else:
            reason = validate_start(container, grant, self._state.policy())
        if reason is None:
            return EMPTY
        self._log(container, reason, phrase)
        return status_of(reason)

    def _log(self, container: Container, reason: Reason, phrase: str) -> None:
        self._later(lambda: log_refusal(container_fields(container), reason, phrase))


def _is_against(container: Container, grant: SignedGrant, other: Container, its: SignedGrant) -> bool:
    """Return whether a container of another pod holds a GPU of this one's grant in a mode that does not go with it."""
    if set(its.uuids).isdisjoint(grant.uuids) or other.pod.uid == container.pod.uid:
        return False
    if other.markers and container.markers:  # pods may share a ResourceClaim
        return False
    return Mode.EXCLUSIVE in (its.mode, grant.mode) or its.mode is not grant.mode


def _grant(container: Container, key: bytes | None) -> SignedGrant | InvalidGrant | None:
    return grant_of(container, container.annotations.get(GRANT_KEY), key)
