"""The XIDs that an observer hears, where the policy has it listen: that keeps GPUs from being reset (DECISIONS 16)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.event_child import EventChild, EventSink
from nri_gpu.health.xids import ActionClass, class_of
from nri_gpu.observe.node_findings import Xids
from nri_gpu.policy.model import DriverSettings
from nri_gpu.system.state import NodeState

KEPT: Final = 16  # of each GPU; a fault can bring thousands


class ObservedXids:
    """The last XIDs of each GPU, and their counts. heard: called with each. doubt: called where one may be missing."""

    def __init__(
        self, driver: DriverSettings, state: NodeState, heard: Callable[[], None], doubt: Callable[[], None]
    ) -> None:
        self._state = state
        self._heard = heard
        self._last: dict[GpuUuid, deque[tuple[int, float]]] = {}
        self.counts: Counter[tuple[str, ActionClass]] = Counter()
        sink = EventSink(self.take, doubt)
        self._child = EventChild(driver.root, driver.library_dirs, sink, stage_dir=driver.stage_dir)

    @property
    def starts(self) -> int:
        return self._child.starts

    @property
    def last(self) -> Xids:
        """Return number and time, in seconds since the epoch, of the last XIDs of each GPU, by its UUID."""
        return {uuid: tuple(each) for uuid, each in self._last.items()}

    async def run(self) -> None:
        """Listen to all GPUs while the policy says so, until cancelled."""
        self.follow()
        await self._child.run()

    def follow(self) -> None:
        """Listen to the GPUs that there are now, if the policy says so now."""
        state = self._state
        wanted = state.settings.observe.xids and not state.node.inventory.simulated
        self._child.listen(frozenset(gpu.pci_bus_id for gpu in state.node.gpus) if wanted else frozenset())

    def take(self, event: GpuEvent) -> None:
        if event.kind != EventType.XID:
            return
        if event.uuid not in {gpu.uuid for gpu in self._state.node.gpus}:
            return
        self._last.setdefault(GpuUuid(event.uuid), deque(maxlen=KEPT)).append((event.xid, time.time()))
        self.counts[event.uuid, class_of(event.xid)] += 1
        self._heard()
