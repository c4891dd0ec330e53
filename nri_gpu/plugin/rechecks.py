"""GPUs that were just released: what looks at their processes found, and looking again until they are free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Final

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid, Unit
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.ledger import Ledger, Releasing
from nri_gpu.ledger.reservations import Wait, expired, looked, vacated
from nri_gpu.policy.model import Unknown
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import Backoff

FIRST_PAUSE_S: Final = 0.1
PIDS_MAX: Final = 4096  # of a monitor's container
LONGEST_PAUSE_S: Final = 2.0  # a look is some calls into the driver, and wakes GPUs that sleep


class ReleasedGpus:
    """The processes that the newest look found on each GPU, and what that means for the ledger under the policy."""

    def __init__(self, state: NodeState, cgroups: ContainerCgroups) -> None:
        self._state = state
        self._cgroups = cgroups
        self._units: Mapping[GpuUuid, Unit] = {}

    def vacated(
        self, after: Ledger, among: Iterable[ContainerId], now: float, reserved: Iterable[AllocatedDevice] = ()
    ) -> Ledger:
        """`after`, in which the GPUs that these containers hold by the ledger of now are kept from others for a while.

        reserved: devices whose reservation ended.
        """
        before, settings = self._state.ledger, self._state.settings.handover
        if after is before or not settings.wait:
            return after
        unknown_waits = self._unknown_waits(self._state.node.inventory)
        awaited = (lambda _: True) if unknown_waits else (lambda uuid: self._processes(uuid) is not None)
        return vacated(before, after, among, Wait(now, settings.grace_s, awaited), reserved)

    def looked(self, inventory: Inventory, began: float) -> Ledger:
        """The ledger after a look that began then."""
        ledger = self._state.ledger
        self._units = {unit.uuid: unit for unit in inventory.units}
        if not ledger.releasing:
            return ledger
        if not self._state.settings.handover.wait:  # since a reload
            return ledger.with_releasing({})
        return looked(ledger, self._processes, began, unknown_waits=self._unknown_waits(inventory))

    def _processes(self, uuid: GpuUuid, left: Releasing | None = None) -> int | None:
        """How many the newest look found; without those that were there before the first of whoever left the GPU.

        Nor those of monitors, as far as NVML tells them by our PIDs.
        """
        unit = self._units.get(uuid)
        if unit is None or unit.processes is None or left is None:
            return unit.processes if unit else None
        first = 0 if left.first_started is None else left.first_started
        monitors = self._monitors_pids(uuid)
        told = zip(unit.started, chain(unit.pids, repeat(0)), strict=False)
        return unit.processes - sum(started < first or pid in monitors for started, pid in told)

    def _monitors_pids(self, uuid: GpuUuid) -> frozenset[int]:
        """PIDs in the cgroups of containers that open a GPU and do not hold it."""
        ledger = self._state.ledger
        watching = (id_ for id_, each in ledger.external.items() if uuid in each.watched)
        processes = (process for id_ in watching if (process := ledger.processes.get(id_)) and process.cgroup)
        return frozenset(chain.from_iterable(self._cgroups.pids(each, PIDS_MAX) for each in processes))

    def _unknown_waits(self, inventory: Inventory) -> bool:
        """Whether to wait where NVML does not tell: a simulated node's file never will."""
        return self._state.settings.handover.unknown is Unknown.WAIT and not inventory.simulated


class Rechecks:
    """Looks again while a released GPU waits to be offered: at once, then more and more rarely.

    look: asks for a look. clock: monotonic seconds.
    """

    def __init__(self, state: NodeState, look: Callable[[], None], clock: Callable[[], float]) -> None:
        self._state = state
        self._look = look
        self._clock = clock
        self._known: frozenset[tuple[GpuUuid, float]] = frozenset()  # GPUs being released, and since when
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._timer: asyncio.TimerHandle | None = None
        state.subscribe(self._ledger_changed, Changed.LEDGER)

    def _ledger_changed(self) -> None:
        releasing = self._state.ledger.releasing.items()
        known, self._known = self._known, frozenset((uuid, each.since) for uuid, each in releasing)
        if self._known - known:
            if self._timer:
                self._timer.cancel()
            self._backoff.reset()
            self._look_and_wait()

    def _look_and_wait(self) -> None:
        self._look()
        self._timer = asyncio.get_running_loop().call_later(self._backoff.next_s(), self._again)

    def _again(self) -> None:
        self._timer = None
        self._state.commit(expired(self._state.ledger, self._clock()))
        if self._state.ledger.releasing:
            self._look_and_wait()
