"""The rig with the health controller and its event process in it."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

from msgspec.structs import replace

from nri_gpu.domain.health import HealthState
from nri_gpu.health.controller import HealthController
from nri_gpu.health.listener import EventChild, EventSink
from nri_gpu.health.node_health import Moment
from nri_gpu.inventory.source import Source
from nri_gpu.policy.health import Events
from nri_gpu.policy.model import Policy
from tests.support.nvml import FakeGpu
from tests.unit.daemon.rig import Rig

SILENCE_S = 4.0  # a hang is noticed soon; a wait takes one second


class HealthRig(Rig):
    """A machine whose GPUs are listened to, all of them. ahead_s: how far its clock is ahead of ours."""

    def __init__(self, base: Path, machine: Sequence[FakeGpu] | None) -> None:
        default = Policy.default()
        self.policy = replace(default, health=replace(default.health, events=Events.ALL))
        self.ahead_s = 0.0
        super().__init__(base, machine)

    def health_of(self, gpu: int = 1) -> HealthState:
        """As the last snapshot has it."""
        return self.node_state.node.gpus[gpu].health.state

    def _listener(self, sink: EventSink) -> EventChild:
        self.listener = EventChild(self.root, (), sink, sysfs=str(self.base / "sys"), silence_s=SILENCE_S)
        return self.listener

    def _moment(self) -> Moment:
        return Moment(time.monotonic() + self.ahead_s, time.time() + self.ahead_s)

    def _judged(self, source: Source) -> Source:
        self.node_state.use(self.policy)
        self.node_state.synchronized = True
        self.health = HealthController(
            self.policy.driver,
            self.base / "health.json",
            self.node_state,
            publish=self._published,
            refresh=lambda: self.cache.poke(),
            simulated=False,
            moment=self._moment,
            listener=self._listener,
        )
        return self.health.watching(source)

    def _ledger_changed(self) -> None:
        self.health.changed()

    def _more(self) -> Sequence[Coroutine[None, None, None]]:
        return (self.health.run(),)
