"""Who keeps what happens: the journal for a daemon that comes after this one, the audit log for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.gpu import Node
from nri_gpu.log import logger
from nri_gpu.runtime.audit import AuditLog
from nri_gpu.runtime.journal import Journal, Remembered


class Recorder(Protocol):
    """Told in the order in which things happen; raises nothing. now: seconds on the ledger's clock."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """A request is about to be answered."""

    def granted(self, grant: Grant, mark: str, now: float) -> None:
        """And was granted GPUs; from here on the runtime may or may not come to know of them. mark: what says so."""

    def settled(self, container_id: ContainerId) -> None:
        """A container was started, or is gone: the runtime's own list tells what it holds."""

    def synchronized(self, ledger: Ledger) -> None:
        """The ledger was made anew from that list."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """What was granted since then and is not settled, by whichever daemon."""


class Nobody:
    """Keeps nothing: for a plugin without a state folder."""

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """Forgets it."""

    def granted(self, grant: Grant, mark: str, now: float) -> None:
        """Forgets it."""

    def settled(self, container_id: ContainerId) -> None:
        """Forgets it."""

    def synchronized(self, ledger: Ledger) -> None:
        """Forgets it."""

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Nothing."""
        del since
        return ()


class StateRecorder:
    """Keeps it in the state folder. Nothing that fails here stops anybody: it is logged once for each new reason.

    later: run something once the reply is on its way. audit: None where policy wants none.
    """

    def __init__(
        self, journal: Journal, audit: AuditLog | None, later: Callable[[Callable[[], None]], object], grace_s: float
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._later = later
        self._grace_s = grace_s
        self._fault = ""
        self._unsettled: dict[ContainerId, float] = {}

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        """For the audit log."""
        if self._audit:
            self._audit.decided(container, decision, node, now)

    def granted(self, grant: Grant, mark: str, now: float) -> None:
        """One unsynced append, before the reply: afterwards might be never."""
        self._try(lambda: self._journal.granted(grant, mark, now))
        self._unsettled[grant.container_id] = now
        if self._journal.full:  # of grants whose containers were never made, and so never settle
            self._later(lambda: self._try(self._compact))

    def settled(self, container_id: ContainerId) -> None:
        """Told to the journal after the reply, and only of what it may still remember."""
        if self._unsettled.pop(container_id, None) is not None:
            self._later(lambda: self._try(lambda: self._settle(container_id)))

    def synchronized(self, ledger: Ledger) -> None:
        """For the audit log."""
        if self._audit:
            self._audit.synchronized(ledger)

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Of the journal; nothing where it cannot be read, for then the marks alone have to do."""
        found: list[Remembered] = []
        self._try(lambda: found.extend(self._journal.remembered(since)))
        self._unsettled |= {each.grant.container_id: each.at for each in found}
        return found

    def _settle(self, container_id: ContainerId) -> None:
        self._journal.settled(container_id)
        self._compact()

    def _compact(self) -> None:
        if self._journal.full:
            since = max(self._unsettled.values(), default=0.0) - self._grace_s
            self._unsettled = {id_: at for id_, at in self._unsettled.items() if at >= since}
            self._journal.compact(since)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if str(error) != self._fault:
                logger.bind(fault=str(error)).warning("journal not written; the marks on the containers hold")
            self._fault = str(error)
        else:
            self._fault = ""
