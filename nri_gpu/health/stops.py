"""What is done about containers on GPUs that are not to be trusted: each is reported, or stopped, as policy says.

By what holds now, and not by what just happened: a GPU may have turned bad before anybody told who holds it, policy may
say something else by now, and a runtime may not have obeyed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from loguru import logger
from msgspec import Struct, field

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.health import Health
from nri_gpu.policy.health import OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.policy.service import GuardSettings
from nri_gpu.system.cri import stop_containers

FIRST_RETRY_S: Final = 5.0
LONGEST_RETRY_S: Final = 300.0


class Holder(Struct, frozen=True):
    """A container on GPUs or MIG devices that nobody should have. name: of its pod. bad: UUID -> what is wrong."""

    name: str
    bad: Mapping[str, str]

    @property
    def why(self) -> str:
        """What is wrong with the first of them."""
        return next(iter(self.bad.values()))


class _Duty(Struct):
    """What was done about one container. due_s: when it is tried again, on the loop's clock."""

    reported: set[str] = field(default_factory=set)
    asked: bool = False
    failures: int = 0
    due_s: float = 0.0


class Stops:
    """Of containers. again: called when `tend` has to be called again, because a stop is to be tried once more."""

    def __init__(self, again: Callable[[], None]) -> None:
        self._again = again
        self._duties: dict[str, _Duty] = {}
        self._running: set[asyncio.Task[None]] = set()

    def tend(self, holders: Mapping[str, Holder], policy: Policy) -> None:
        """Do what is still to do. holders: by container id; who is not among them any more is forgotten."""
        self._duties = {container: self._duties.get(container) or _Duty() for container in holders}
        if policy.health.containers is OnBad.REPORT:
            for container, holder in holders.items():
                self._report(container, holder)
            return
        for why, names in _by_reason(holders, self._due(holders)).items():
            task = asyncio.create_task(self._stop(names, policy.guard, f"its GPU is bad: {why}"))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Nobody waits for what is still being stopped."""
        for task in self._running:
            task.cancel()

    def _report(self, container: str, holder: Holder) -> None:
        duty = self._duties[container]
        for unit, why in holder.bad.items():
            if unit not in duty.reported:
                duty.reported.add(unit)
                bound = logger.bind(gpu_uuid=unit, reason=why, pod_name=holder.name, container_id=container)
                bound.warning("container is on a bad gpu")

    def _due(self, holders: Iterable[str]) -> Iterator[str]:
        now = asyncio.get_running_loop().time()
        for container in holders:
            duty = self._duties[container]
            if not duty.asked and duty.due_s <= now:
                duty.asked = True
                yield container

    async def _stop(self, names: Mapping[str, str], settings: GuardSettings, why: str) -> None:
        duties = {container: self._duties[container] for container in names}
        try:
            stopped = await stop_containers(names, settings, why)
        except (OSError, TimeoutError) as error:
            fault = str(error) or f"no answer on {settings.cri_socket}"
            logger.bind(socket=settings.cri_socket, fault=fault).error("containers not stopped")
            stopped = frozenset()
        for duty in (duty for container, duty in duties.items() if container not in stopped):
            self._try_again(duty)

    def _try_again(self, duty: _Duty) -> None:
        loop = asyncio.get_running_loop()
        pause_s = min(FIRST_RETRY_S * (1 << min(duty.failures, 10)), LONGEST_RETRY_S)
        duty.asked, duty.failures, duty.due_s = False, duty.failures + 1, loop.time() + pause_s
        loop.call_at(duty.due_s, self._again)


def holders_of(barred: Mapping[str, Health], ledger: Ledger) -> Mapping[str, Holder]:
    """Who holds one of these, by container id."""
    if not barred:
        return {}
    found: dict[str, Holder] = {}
    for entry in ledger.entries.values():
        bad: dict[str, str] = {unit: barred[unit].why for unit in entry.grant.uuids if unit in barred}
        if bad and entry.holds:
            found[entry.grant.container_id] = Holder(f"{entry.grant.namespace}/{entry.grant.pod_name}", bad)
    return found


def _by_reason(holders: Mapping[str, Holder], due: Iterable[str]) -> Mapping[str, dict[str, str]]:
    """Reason -> containers and names."""
    found: dict[str, dict[str, str]] = {}
    for container in due:
        found.setdefault(holders[container].why, {})[container] = holders[container].name
    return found
