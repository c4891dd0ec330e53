"""The XIDs of the node's GPUs, counted as they come: also those that change nothing, by the thousand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from loguru import logger

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.applications import Failures, is_of_application
from nri_gpu.health.gpu_record import Moment
from nri_gpu.health.xids import ActionClass, class_of, xid_name
from nri_gpu.ledger.ledger import Ledger

UNKNOWN_MAX: Final = 256  # numbers that are logged
SAME_S: Final = 60.0  # failures under the same containers are noted as often


class XidLog:
    """A count of XIDs by GPU and class of the catalogue's action, `counts`, and of applications' `failures`."""

    def __init__(self, failures: Failures) -> None:
        self.counts: Counter[tuple[str, ActionClass]] = Counter()
        self.failures = failures
        self._last: dict[str, tuple[int, float]] = {}
        self._unknown: set[int] = set()
        self._noted: dict[str, tuple[Ledger, float]] = {}

    def count(self, event: GpuEvent, units: frozenset[str], ledger: Ledger, now: Moment) -> bool:
        """Count an event. Return whether an application failed. units: UUIDs of the GPU and its MIG devices."""
        if event.kind != EventType.XID:
            return False
        found = class_of(event.xid)
        self.counts[event.uuid, found] += 1
        self._last[event.uuid] = (event.xid, now.wall_s)
        if found is ActionClass.UNKNOWN:
            self._log_unknown(event)
        return is_of_application(event) and self._failed(event.uuid, units, ledger, now)

    def last(self, uuid: str) -> tuple[str, float | None]:
        """Return a GPU's last XID with its meaning, or empty, and when it came, in seconds since the epoch."""
        xid, at_s = self._last.get(uuid, (None, None))
        return ("" if xid is None else xid_name(xid)), at_s

    def _failed(self, uuid: str, units: frozenset[str], ledger: Ledger, now: Moment) -> bool:
        before, at_s = self._noted.get(uuid, (None, 0.0))
        if before is ledger and now.clock_s - at_s < SAME_S:
            return False
        self._noted[uuid] = (ledger, now.clock_s)
        namespaces = _namespaces(units, ledger)
        if namespaces:
            self.failures = self.failures.having(GpuUuid(uuid), namespaces, now.clock_s)
        return bool(namespaces)

    def _log_unknown(self, event: GpuEvent) -> None:
        if event.xid not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(event.xid)
            logger.bind(gpu_uuid=event.uuid, xid=event.xid).warning("XID is not in the catalogue")


def by_action(counts: Mapping[tuple[str, ActionClass], int], uuid: str) -> Mapping[ActionClass, int]:
    """Return a GPU's counts, of each class, so that the first increase of each counts."""
    return {each: counts.get((uuid, each), 0) for each in ActionClass}


def _namespaces(units: frozenset[str], ledger: Ledger) -> frozenset[str]:
    """Return the namespaces of the containers that hold a unit of these."""
    grants = (entry.grant for entry in ledger.entries.values() if entry.holds)
    granted = {grant.namespace for grant in grants if not units.isdisjoint(grant.held)}
    others = (each for each in ledger.external.values() if not units.isdisjoint(each.held))
    return frozenset(granted | {each.pod.partition("/")[0] for each in others})
