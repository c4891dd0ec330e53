"""Monitors, the pods that only watch: those of the policy, but for GPUs that the kubelet allocated to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from nri_gpu.domain.container import PodId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.opened import Monitors
from nri_gpu.stray.allocated import AllocationsUnknownError, allocated
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import Backoff, LogOnce

FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0


class MonitorPods:
    """The monitors by the policy in force. ask: the kubelet, by its socket, for what it allocated to pods by name.

    Until the kubelet has answered, a monitor holds only what was granted to it: the answer takes a fraction of a
    second, and an exporter must not take the node out of service for so long.
    """

    def __init__(
        self,
        state: NodeState,
        ask: Callable[[str], Awaitable[Mapping[tuple[str, str], frozenset[GpuUuid]]]] = allocated,
        *,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._state = state
        self._ask = ask
        self._first_retry_s = first_retry_s
        self._now = Monitors()
        self._woken = asyncio.Event()
        self._log = LogOnce()
        state.then(self._woken.set, Changed.LEDGER, Changed.POLICY)

    @property
    def now(self) -> Monitors:
        """Return the monitors: the same object until the policy or an answer of the kubelet changes it."""
        pods = self._state.settings.foreign.monitors
        if pods is not self._now.pods:
            self._now = Monitors(pods, self._now.allocated)
        return self._now

    async def run(self, changed: Callable[[], None]) -> None:
        """Ask about each sandbox of a monitor once, until cancelled. changed: called when `now` is another value."""
        waits = Backoff(self._first_retry_s, LONGEST_RETRY_S)
        while True:
            await self._woken.wait()
            self._woken.clear()
            while unasked := self._unasked():
                try:
                    listed = await self._ask(self._state.settings.kubelet.podresources)
                except AllocationsUnknownError as error:
                    self._log.warning("kubelet allocations of monitors are unknown", str(error))
                    await asyncio.sleep(waits.next_s())
                    continue
                waits.reset()
                self._log.clear()
                self.told({id_: listed.get(_named(pod), frozenset()) for id_, pod in unasked.items()})
                changed()

    def told(self, allocated_to: Mapping[PodId, frozenset[GpuUuid]]) -> None:
        """Take what the kubelet allocated to these sandboxes, and forget those that are gone."""
        there = {each.pod_id for each in self._state.ledger.external.values()}
        known = {id_: uuids for id_, uuids in self._now.allocated.items() if id_ in there}
        self._now = Monitors(self._now.pods, {**known, **allocated_to})

    def _unasked(self) -> Mapping[PodId, str]:
        """Return the sandboxes of monitors that have a container with GPUs, and that nobody has asked about."""
        monitors, opening = self.now, self._state.ledger.external.values()
        pods = {each.pod_id: each.pod for each in opening if monitors.pods.match(each.pod)}
        return {id_: pod for id_, pod in pods.items() if id_ not in monitors.allocated}


def _named(pod: str) -> tuple[str, str]:
    namespace, _, name = pod.partition("/")
    return namespace, name
