"""The refreshing of a node's inventory: changes are published, and whoever depends on a change is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import WELL, History, Transition, TransitionKind
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.nvml_source import Source
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import Backoff, LogOnce, first_done, tell

REFRESH_S: Final = 60.0
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 30.0


class InventoryCache:
    """The last inventory of one source.

    After a failure the last inventory stays `current` and its age grows. If there is no inventory yet, one with that
    fault is published.
    """

    def __init__(
        self,
        source: Source,
        publish: Callable[[Inventory], None],  # called with each inventory that differs in more than its age
        on_fault: Callable[[str], None],  # called with the sentence of each failure
        *,
        # Adds to an answer what the source does not know. Its second argument: when the source was asked, `boot_clock`.
        completed: Callable[[Inventory, float], Inventory] = lambda inventory, _: inventory,
        poked: asyncio.Event | None = None,  # set by whoever wants a refresh now
        refresh_s: float = REFRESH_S,
        boot_clock: Callable[[], float] = since_boot_s,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._publish = publish
        self._on_fault = on_fault
        self._completed = completed
        self._followers: list[Callable[[Inventory, float], None]] = []
        self._refresh_s = refresh_s
        self._boot_clock = boot_clock
        self._monotonic = monotonic
        self._answered: float | None = None  # by that clock
        self._sleep = sleep
        self.current: Inventory | None = None  # None before the first
        self.confirmed = False  # the source has answered; until then `current` is recalled from an earlier process
        self.fault = ""  # why the last refresh failed, or empty
        self._backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        self._poked = poked or asyncio.Event()
        self._ready = asyncio.Event()

    def recall(self, inventory: Inventory) -> None:
        """Use an earlier process's inventory until the source answers."""
        self.current = inventory
        self._answered = inventory.taken_at

    def subscribe(self, looked: Callable[[Inventory, float], None]) -> None:
        """Call `looked` with each answer of the source, and with when it was asked for, in seconds of `monotonic`."""
        self._followers.append(looked)

    def age_s(self) -> float | None:
        """Return the seconds since the source last answered, suspended time included, or None if it never did.

        The age of a recalled inventory counts from when it was taken, which is longer.
        """
        return None if self._answered is None else self._boot_clock() - self._answered

    def poke(self) -> None:
        """Refresh now, without waiting for the rest of the pause."""
        self._poked.set()

    async def ready(self) -> None:
        """Wait until an inventory was published, be it a fault."""
        await self._ready.wait()

    async def run(self) -> None:
        """Refresh until cancelled, then close the source."""
        try:
            while True:
                # Before the refresh: a poke during one may be about something that this one did not see any more.
                self._poked.clear()
                await self.refresh()
                pause_s = min(self._backoff.next_s(), self._refresh_s) if self.fault else self._refresh_s
                await first_done(self._sleep(pause_s), self._poked.wait())
        finally:
            await self._source.close()

    async def refresh(self) -> None:
        began, asked_s = self._monotonic(), self._boot_clock()
        try:
            inventory = self._completed(await self._source.refresh(), asked_s)
        except InventoryError as error:
            self._failed(error)
        else:
            self._succeeded(inventory)
            tell(self._followers, inventory, began)
        self._ready.set()

    def _succeeded(self, inventory: Inventory) -> None:
        if self.fault:
            logger.bind(attempt=self._backoff.failures).info("inventory refreshed again")
        self.fault = ""
        self._backoff.reset()
        self._answered = self._boot_clock()
        if not self.confirmed and self.current and not self.current.fault:
            logger.info("last snapshot is confirmed" if _same(self.current, inventory) else "the node has changed")
        self.confirmed = True
        before, self.current = self.current, inventory
        if before is None or not _same(before, inventory):
            self._publish(inventory)

    def _failed(self, error: InventoryError) -> None:
        self.fault = str(error)
        self._on_fault(self.fault)
        before = self.current
        if before is None or before.fault:
            # Nothing better is known than which GPUs the kernel shows.
            self.current = Inventory(taken_at=self._boot_clock(), fault=self.fault, unlisted=error.unlisted)
            if before is None or not _same(before, self.current):
                self._publish(self.current)


def _same(one: Inventory, other: Inventory) -> bool:
    """Return whether two inventories are equal apart from when they were taken."""
    return replace(one, taken_at=other.taken_at) == other


# After these alone the driver's files are scanned, which takes seconds.
DRIVER: Final = frozenset({TransitionKind.ANSWER, TransitionKind.DRIVER})
_LOGGED_ELSEWHERE: Final = frozenset({TransitionKind.HEALTH})  # by the health controller, when it decides


class InventoryController:
    """The publisher of inventories as part of the node state; it keeps every transition since the daemon began."""

    def __init__(
        self,
        node_state: NodeState,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_state = node_state
        self._followers: list[Callable[[], None]] = []
        self._wall = wall
        self._initial = node_state.node.inventory  # from before anything was known
        self._faults = LogOnce(clock=monotonic)
        self.history = History(began_s=wall())

    def subscribe(self, driver_changed: Callable[[], None]) -> None:
        """Call `driver_changed` once the driver answers, or not any more, or is another; and after the first."""
        self._followers.append(driver_changed)

    def publish(self, inventory: Inventory) -> None:
        """Take an inventory that differs from the one before."""
        before = self._node_state.node.inventory
        first = before is self._initial
        self._node_state.put_inventory(inventory)
        # A node seen for the first time logs only its faults.
        found = changes(_without_faults(inventory) if first else before, inventory)
        # The cache reports whether the driver answers, and that is noted there.
        noted = [each for each in found if each.kind is not TransitionKind.ANSWER]
        known = {"gpus": len(inventory.gpus), "inventory_number": self._node_state.node.number}
        bound = logger.bind(**known, driver_version=inventory.driver_version)
        bound.log("INFO" if first or noted else "DEBUG", "inventory changed")
        for each in noted:
            if each.kind not in _LOGGED_ELSEWHERE:
                _log(each)
        self._note(noted)
        if first or any(each.kind in DRIVER for each in found):
            tell(self._followers)

    def not_refreshed(self, sentence: str) -> None:
        """Log that the source did not answer, and note a transition if the sentence is a new one."""
        another = sentence != self._faults.fault
        self._faults.warning("inventory not refreshed", sentence)
        if another:
            self._note([Transition(kind=TransitionKind.ANSWER, what=f"not refreshed: {sentence}", worse=True)])

    def answered(self) -> None:
        if self._faults.fault:
            self._faults.clear()
            self._note([Transition(kind=TransitionKind.ANSWER, what="the driver answers again")])

    def module_changed(self, version: str) -> None:
        """Note that another kernel module is loaded, or that none is; the caller has logged it."""
        what = f"kernel module nvidia {version} is loaded" if version else "kernel module nvidia is no longer loaded"
        self._note([Transition(kind=TransitionKind.MODULE, what=what, worse=not version)])

    def cordoned(self, gpu_uuid: GpuUuid, what: str, *, worse: bool) -> None:
        """Note a GPU that root took out of use, or that is in use again. what: a clause. The caller has logged it."""
        gpu = next((gpu for gpu in self._node_state.node.gpus if gpu.uuid == gpu_uuid), None)
        name, index = (f"GPU {gpu.index} ({gpu_uuid})", gpu.index) if gpu else (f"GPU {gpu_uuid}", None)
        kind = TransitionKind.AVAILABLE
        self._note([Transition(kind=kind, what=f"{name} {what}", uuid=gpu_uuid, index=index, worse=worse)])

    def _note(self, transitions: Iterable[Transition]) -> None:
        self.history = self.history.having(transitions, self._wall())


def _without_faults(inventory: Inventory) -> Inventory:
    """Return the inventory with each GPU healthy and available, and without faults."""
    gpus = tuple(
        replace(
            gpu, unavailable="", signs=(), health=WELL, mig=tuple(replace(each, unavailable="") for each in gpu.mig)
        )
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus, faults=(), unlisted=(), fault="")


def _log(transition: Transition) -> None:
    bound = logger.bind(event=transition.kind.value)
    if transition.index is not None:
        bound = bound.bind(index=transition.index)
    if transition.uuid:
        bound = bound.bind(gpu_uuid=transition.uuid)
    if transition.kind is TransitionKind.DESCRIPTION and transition.worse:
        bound.bind(fault=transition.what).warning("GPU cannot be described")
    else:
        bound.bind(reason=transition.what).log("WARNING" if transition.worse else "INFO", "node changed")
