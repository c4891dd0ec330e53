"""The plugin's records in the state folder: the journal, and the audit log if policy wants one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from loguru import logger

from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Decision, Grant
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.recording import Remembered
from nri_gpu.records.audit import AuditLog
from nri_gpu.records.journal import Journal
from nri_gpu.system.tasks import LogOnce, tell


class StateRecorder:
    """The recorder in the state folder. No failure here raises; a full disk is logged once for each new reason.

    later: run something once the reply is on its way. audit: None if policy wants none.
    """

    def __init__(
        self, journal: Journal, audit: AuditLog | None, later: Callable[[Callable[[], object]], object], grace_s: float
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._later = later
        self._grace_s = grace_s
        self._faults = LogOnce()
        self._unsettled: dict[ContainerId, float] = {}

    def decided(self, container: Container, decision: Decision, node: Node, now: float) -> None:
        if self._audit:
            tell([self._audit.decided], container, decision, node, now)

    def granted(self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId]) -> bool:
        """Append a grant without sync, before the reply: after it, the process may be gone."""
        written = self._try(lambda: self._journal.granted(grant, signed, now, revoked))
        self._unsettled[grant.container_id] = now
        if self._journal.full:  # of grants whose containers were never made, and so never settle
            self._later(lambda: self._try(self._compact))
        return written

    def revoked(self) -> Mapping[ContainerId, PodId]:
        """Return the journal's revoked containers, or none if it cannot be read."""
        found: dict[ContainerId, PodId] = {}
        self._try(lambda: found.update(self._journal.revoked()))
        return found

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        self._later(lambda: self._try(lambda: self._journal.removed(container_ids)))

    def settled(self, *container_ids: ContainerId) -> None:
        """Append, after the reply, the settled grants that the journal may still have."""
        for each in container_ids:
            if self._unsettled.pop(each, None) is not None:
                self._later(partial(self._try, partial(self._settle, each)))

    def synchronized(self, ledger: Ledger) -> None:
        if self._audit:
            tell([self._audit.synchronized], ledger)

    def remembered(self, since: float) -> Iterable[Remembered]:
        """Return the journal's grants, or none if it cannot be read; then only the grants on the containers count."""
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

    def _try(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except OSError as error:
            self._faults.warning("journal not written; signed grants on containers stay valid", fault_of(error))
            return False
        except Exception as error:
            logger.opt(exception=error).error("bug in the journal; signed grants on containers stay valid")
            return False
        self._faults.clear()
        return True
