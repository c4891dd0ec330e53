"""The containers on GPUs that are withheld: they are reported or stopped, as policy says.

This goes by what holds now and not by what just happened: a GPU may have turned bad before it was known who holds it,
policy may have changed since, and a runtime may not have stopped a container.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final

from loguru import logger
from msgspec import Struct, field

from nri_gpu.domain.health import Health
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.health_settings import OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import GuardSettings
from nri_gpu.system.container_stops import stop_containers
from nri_gpu.system.tasks import Backoff

LONGEST_RETRY_S: Final = 300.0


class AffectedContainer(Struct, frozen=True):
    """A container on withheld GPUs or MIG devices. name: of its pod. bad: UUID -> what is wrong."""

    name: str
    bad: Mapping[str, str]

    @property
    def why(self) -> str:
        """Return what is wrong with the first bad GPU or MIG device."""
        return next(iter(self.bad.values()))


class _Stop(Struct):
    """A container's stop so far. due_s: when to try next, on the loop's clock; never while it is under way, or done."""

    backoff: Backoff
    reported: set[str] = field(default_factory=set)
    due_s: float = 0.0


class Stops:
    """The stops, or reports, of containers.

    again: called when `update` has to be called again to retry a stop. stop: stops containers, and returns which.
    """

    def __init__(
        self,
        again: Callable[[], None],
        stop: Callable[[Mapping[str, str], GuardSettings, str], Awaitable[frozenset[str]]] = stop_containers,
        first_retry_s: float = 5.0,
    ) -> None:
        self._again = again
        self._stop_containers = stop
        self._first_retry_s = first_retry_s
        self._stops: dict[str, _Stop] = {}
        self._running: set[asyncio.Task[None]] = set()

    def update(self, holders: Mapping[str, AffectedContainer], policy: Policy) -> None:
        """Do what is left to do. holders: by container id; other containers are forgotten."""
        self._stops = {
            container: self._stops.get(container) or _Stop(Backoff(self._first_retry_s, LONGEST_RETRY_S))
            for container in holders
        }
        if policy.health.containers is OnBad.REPORT:
            for container, holder in holders.items():
                self._report(container, holder)
            return
        for why, names in _by_reason(holders, self._due(holders)).items():
            task = asyncio.create_task(self._stop(names, policy.guard, f"its GPU is bad: {why}"))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Cancel the stops that are still under way."""
        for task in self._running:
            task.cancel()

    def _report(self, container: str, holder: AffectedContainer) -> None:
        stop = self._stops[container]
        for unit, why in holder.bad.items():
            if unit not in stop.reported:
                stop.reported.add(unit)
                bound = logger.bind(gpu_uuid=unit, reason=why, pod_name=holder.name, container_id=container)
                bound.warning("container holds an unhealthy GPU")

    def _due(self, holders: Iterable[str]) -> Iterator[str]:
        now = asyncio.get_running_loop().time()
        for container in holders:
            stop = self._stops[container]
            if stop.due_s <= now:
                stop.due_s = math.inf
                yield container

    async def _stop(self, names: Mapping[str, str], settings: GuardSettings, why: str) -> None:
        stops = {container: self._stops[container] for container in names}
        stopped = await self._stop_containers(names, settings, why)
        loop = asyncio.get_running_loop()
        for container, stop in stops.items():
            if container not in stopped:
                stop.due_s = loop.time() + stop.backoff.next_s()
                loop.call_at(stop.due_s, self._again)


def holders_of(withheld: Mapping[str, Health], ledger: Ledger) -> Mapping[str, AffectedContainer]:
    """Return the containers that hold a withheld GPU or MIG device, by container id."""
    if not withheld:
        return {}
    found: dict[str, AffectedContainer] = {}
    for entry in ledger.entries.values():
        bad: dict[str, str] = {unit: withheld[unit].why for unit in entry.grant.held if unit in withheld}
        if bad and entry.holds and not entry.lost:  # no runtime can stop those
            found[entry.grant.container_id] = AffectedContainer(entry.grant.pod, bad)
    return found


def _by_reason(holders: Mapping[str, AffectedContainer], due: Iterable[str]) -> Mapping[str, dict[str, str]]:
    """Group containers and names by reason."""
    found: dict[str, dict[str, str]] = {}
    for container in due:
        found.setdefault(holders[container].why, {})[container] = holders[container].name
    return found
