"""The observer: it looks at the node when something changed, when it is time and when somebody asks, and concludes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.daemon.answers import ObserverStatus, StrayStatus
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.domain.text import counted
from nri_gpu.health.gpu_record import Moment
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.observe.finding_log import log_findings
from nri_gpu.observe.given import NO_KUBELET, Given
from nri_gpu.observe.looker import PROCESSES
from nri_gpu.observe.looks import NodeLook
from nri_gpu.observe.node_findings import Xids
from nri_gpu.observe.observed import Observed, observed_after
from nri_gpu.system.folder_watch import FolderWatch
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import LogOnce, set_within

SETTLE_S: Final = 1.0  # after a bundle came or went: others follow, and its files are written after its folder
FRESH_S: Final = 10.0  # as old as a look may be for somebody who asks
FRESH_WAIT_S: Final = 3.0  # for an answer to wait for a look

AWAY: Final = "the kubelet's socket is gone, so what it gave is shown as it was: it may be starting again"


class Senses(Struct, frozen=True, kw_only=True):
    """The observer's ways to learn of the node; each answers, whatever is on the node.

    look: at the containers, and if it is true at all processes. given: what the kubelet lists. folders: those whose
    entries are bundles.
    """

    look: Callable[[Inventory, bool], Awaitable[NodeLook]]
    given: Callable[[], Awaitable[Given]]
    folders: Callable[[], Iterable[Path]]


class Observer:
    """A controller for the life of the process. It holds all that it knows in memory.

    observed: what follows from the last look. Its ledger is the node state's. xids: the last of each GPU. without: what
    is not seen for want of NVML, or empty.
    """

    def __init__(
        self,
        state: NodeState,
        senses: Senses,
        *,
        xids: Callable[[], Xids] = dict,
        without: Callable[[], str] = str,
        settle_s: float = SETTLE_S,
        fresh_s: float = FRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._senses = senses
        self._xids = xids
        self._without = without
        self._settle_s, self._fresh_s = settle_s, fresh_s
        self._clock = clock
        self.observed = Observed()
        self._look: NodeLook | None = None
        self._majors = Majors()  # of the nodes that were looked for
        self._given = NO_KUBELET
        self._processes_at = self._looked_at = self._kubelet_at = -math.inf  # when these looks began
        self._known_at = -math.inf  # when the last look at processes began that is over
        self._changed_at: float | None = None  # when the first bundle came or went that was not looked at yet
        self._kubelet_due = True
        self._asked = False
        self._fault = ""  # why there was no look, where that is a bug
        self._woken, self._looked = asyncio.Event(), asyncio.Event()
        self._faults = LogOnce()
        state.then(self._node_changed, Changed.NODE)
        state.then(self.conclude, Changed.POLICY)

    @property
    def ready(self) -> bool:
        """Return whether it has looked at containers and processes."""
        return self._look is not None

    @property
    def containers(self) -> Mapping[ContainerId, ListedContainer]:
        return self.observed.containers

    async def run(self) -> None:
        """Look, now and then, until cancelled."""
        self._asked = True
        watch = FolderWatch(self._bundles_changed)
        try:
            self._open(watch)
            while True:
                processes = await self._due()
                with suppress(OSError):  # one that went just now
                    watch.add(self._senses.folders())  # before the look: what comes after it is told
                await self._look_again(processes)
        finally:
            watch.close()

    async def fresh(self) -> None:
        """Return once there is a look that is not old, after FRESH_WAIT_S at most. It is made if there is none."""
        oldest = self._clock() - self._fresh_s
        if self._known_at >= oldest:
            return
        self._asked = self._asked or self._processes_at < oldest  # else such a look is under way
        self._looked.clear()
        self._woken.set()
        await set_within(self._looked, FRESH_WAIT_S)

    def conclude(self) -> None:
        """Conclude from the last look again: a GPU or the policy is another, or there was an XID."""
        if self._look is None:
            return
        inventory, policy, xids = self._state.node.inventory, self._state.settings, self._xids()
        moment, before = Moment(self._clock(), time.time()), self.observed
        self.observed = observed_after(before.memory, self._look, self._given, inventory, policy, moment, xids)
        log_findings(before.findings, self.observed.findings)
        self._state.synchronized = True
        self._state.commit(self.observed.ledger)

    def status(self) -> ObserverStatus:
        look, given = self._look, self._given
        unseen = [each.sentence for each in look.unseen] if look else []
        more = f"{counted(self.observed.more, 'more finding')}: mend those that are shown" if self.observed.more else ""
        return ObserverStatus(
            looked_s=_wall(look.at) if look else None,
            kubelet_s=None if given.at is None else _wall(given.at),
            kubelet=given.kubelet,
            unseen=tuple(filter(None, (*unseen, given.fault, self._without(), self._fault, more))),
            allocations=self.observed.allocations,
            findings=self.observed.findings,
            quiet=self.observed.quiet,
        )

    def stray(self) -> StrayStatus:
        looked_s = None if self._known_at == -math.inf else _wall(self._known_at)
        return StrayStatus(True, looked_s, "", self.observed.strays)

    def _open(self, watch: FolderWatch) -> None:
        """Watch the bundles' folders. Where the node has no inotify instance left, looks come by time alone."""
        with suppress(OSError):
            watch.open(self._senses.folders())

    def _bundles_changed(self) -> None:
        self._changed_at = self._clock() if self._changed_at is None else self._changed_at
        self._woken.set()

    def _node_changed(self) -> None:
        """Look again where the driver's nodes have other numbers, else conclude again."""
        if self._state.node.inventory.majors != self._majors:
            self._asked = True
            self._woken.set()
        self.conclude()

    async def _due(self) -> bool:
        """Wait until it is time to look. Return whether to look at the processes, too."""
        while True:
            settings, now = self._state.settings.observe, self._clock()
            processes_due = self._processes_at + settings.look_s
            due = processes_due
            if self._kubelet_due:
                due = min(due, max(self._kubelet_at, self._looked_at) + settings.kubelet_s)
            if self._changed_at is not None:
                due = min(due, max(self._changed_at + self._settle_s, self._looked_at + settings.kubelet_s))
            if self._asked or now >= due:
                return self._asked or now >= processes_due
            self._woken.clear()
            await set_within(self._woken, due - now)

    async def _look_again(self, processes: bool) -> None:
        """Look once. Whatever goes wrong here, the next look is tried."""
        self._asked, changed, self._changed_at = False, self._changed_at is not None, None
        self._looked_at = began = self._clock()
        if processes:
            self._processes_at = began
        inventory = self._state.node.inventory
        self._majors = inventory.majors
        try:
            look = await self._senses.look(inventory, processes)
            await self._ask_kubelet(changed or _ids(look) != _ids(self._look))
            self._take(look)
        except Exception as error:
            if repr(error) != self._faults.fault:
                logger.opt(exception=True).error("bug: a look at the node failed")
            self._faults.fault = repr(error)
            self._fault = f"a look at the node failed by a bug of nri-gpu ({type(error).__name__}); its log has it"
        else:
            self._fault = ""
            self._faults.clear()
        self._known_at = self._processes_at
        self._looked.set()

    async def _ask_kubelet(self, changed: bool) -> None:
        """Ask the kubelet, unless it was just now: then soon. changed: a container came or went."""
        self._kubelet_due = self._kubelet_due or changed or bool(self._given.fault)
        if self._kubelet_due and self._clock() - self._kubelet_at >= self._state.settings.observe.kubelet_s:
            self._kubelet_at, self._kubelet_due = self._clock(), False
            given, before = await self._senses.given(), self._given
            if before.kubelet and not given.kubelet:
                given = Given(kubelet=True, fault=given.fault or AWAY)
            if given.fault and not given.devices:  # what it gave before it still has given, but for pods that ended
                given = replace(given, at=before.at, devices=before.devices)
            self._given = given

    def _take(self, look: NodeLook) -> None:
        """Keep a look, and what the last look at processes did not see."""
        if look.extent is None and self._look:
            kept = (each for each in self._look.unseen if each.what == PROCESSES)
            look = replace(look, unseen=(*look.unseen, *kept))
        self._look = look
        self.conclude()


def _ids(look: NodeLook | None) -> frozenset[ContainerId]:
    return frozenset(each.id for each in look.containers) if look else frozenset()


def _wall(monotonic: float) -> float:
    """Return a moment of the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - monotonic)
