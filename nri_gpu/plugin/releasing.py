"""The daemon's part in handing GPUs over: what looks at them found, and looking again while somebody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.releasing import Wait, looked, vacated
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.model import HandoverSettings, Unknown

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0  # a look is some calls into the driver, and wakes GPUs that sleep


class Handover:
    """What the newest look told of processes, and what that means for a ledger under a policy."""

    def __init__(self) -> None:
        self._processes: dict[GpuUuid, int | None] = {}

    def vacated(
        self,
        before: Ledger,
        after: Ledger,
        among: Iterable[ContainerId],
        now: float,
        settings: HandoverSettings,
        *,
        simulated: bool,
    ) -> Ledger:
        """`after`, in which these containers may have left GPUs that they held in `before`. simulated: the node is."""
        if after is before or not settings.wait:
            return after
        told_of = self._processes
        # Of a simulated node a file tells, and what it does not tell will never be told.
        unknown_waits = settings.unknown is Unknown.WAIT and not simulated
        awaited = (lambda _: True) if unknown_waits else (lambda uuid: told_of.get(uuid) is not None)
        return vacated(before, after, among, Wait(now, settings.grace_s, awaited))

    def looked(self, ledger: Ledger, inventory: Inventory, began: float, settings: HandoverSettings) -> Ledger:
        """After a look that began then."""
        self._processes = {unit.uuid: unit.processes for unit in inventory.units}
        if not ledger.releasing:
            return ledger
        if not settings.wait:  # since a reload
            return ledger.with_releasing({})
        unknown_waits = settings.unknown is Unknown.WAIT and not inventory.simulated
        return looked(ledger, self._processes, began, unknown_waits=unknown_waits)


class Rechecks:
    """Looks again while a GPU waits to be offered: at once, then more and more rarely.

    look: asks for a look. waiting: whether any still waits.
    """

    def __init__(self, look: Callable[[], None], waiting: Callable[[], bool]) -> None:
        self._look = look
        self._waiting = waiting
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A GPU was left."""
        if self._timer:
            self._timer.cancel()
        self._pause_s = FIRST_PAUSE_S
        self._look_and_wait()

    def _look_and_wait(self) -> None:
        self._look()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._again)

    def _again(self) -> None:
        self._timer = None
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self._waiting():
            self._look_and_wait()
