"""Failures of applications: under containers of several namespaces, the GPU may be what fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.xids import APPLICATIONS, ActionClass, class_of

DAY_S: Final = 86400.0
NAMESPACES_MIN: Final = 3
KEPT: Final = 32  # of a GPU


class Failed(Struct, frozen=True):
    """A failure of an application.

    namespaces: of all containers that held the GPU, since NVML does not tell whose it was.

    at_s: for the last time, on the clock.
    """

    namespaces: tuple[str, ...]
    at_s: float


class Failures(Struct, frozen=True):
    """The newest failures of each GPU, the oldest first; one for each set of namespaces."""

    by_gpu: Mapping[GpuUuid, tuple[Failed, ...]] = {}

    def having(self, uuid: GpuUuid, namespaces: frozenset[str], now_s: float) -> Failures:
        """Add a failure that happens now."""
        latest = Failed(tuple(sorted(namespaces)), now_s)
        others = [each for each in self._recent(uuid, now_s) if each.namespaces != latest.namespaces]
        return Failures({**self.by_gpu, uuid: (*others[1 - KEPT :], latest)})

    def namespaces(self, uuid: GpuUuid, now_s: float) -> tuple[str, ...]:
        """Return the namespaces under whose containers it failed within a day, or empty while fewer may be to blame."""
        seen = set[str]()
        apart = 0
        for each in sorted(self._recent(uuid, now_s), key=lambda each: len(each.namespaces)):
            apart += seen.isdisjoint(each.namespaces)
            seen.update(each.namespaces)
        return tuple(sorted(seen)) if apart >= NAMESPACES_MIN else ()

    def _recent(self, uuid: GpuUuid, now_s: float) -> Iterator[Failed]:
        return (each for each in self.by_gpu.get(uuid, ()) if now_s - each.at_s < DAY_S)


def is_of_application(event: GpuEvent) -> bool:
    """Return whether a program may have caused the event, or ended because of it."""
    if event.kind != EventType.XID:
        return False
    return event.xid in APPLICATIONS or class_of(event.xid) is ActionClass.RESTART
