"""Keeps the board's inventory: each that is published, what changed with it, and who has to look because of that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import WELL, History, Transition, TransitionKind
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.source import Source
from nri_gpu.system.state import Board

# Which transitions are news to whom. What flaps (heat, say) is to nobody: a scan of the driver's files costs seconds.
DRIVER: Final = frozenset({TransitionKind.ANSWER, TransitionKind.DRIVER})
PROFILES: Final = frozenset({TransitionKind.GPU, TransitionKind.NUMBER})
LABELS: Final = frozenset(
    {TransitionKind.ANSWER, TransitionKind.DRIVER, TransitionKind.GPU, TransitionKind.MIG, TransitionKind.FACTS}
)
ALL: Final = frozenset(TransitionKind)
_SAID_BY_OTHERS: Final = frozenset({TransitionKind.HEALTH})  # `HealthKeeper`, when it makes up its mind


class Followers(Struct, frozen=True, kw_only=True):
    """Who looks again when something changed that they depend on: the driver's files, profiles, labels."""

    driver: Callable[[], None]
    profiles: Callable[[], None]
    labels: Callable[[], None]


class InventoryKeeper:
    """Between the cache and the board; remembers every transition since the daemon began."""

    def __init__(self, board: Board, followers: Followers, *, wall: Callable[[], float] = time.time) -> None:
        self._board = board
        self._news = (followers.driver, DRIVER), (followers.profiles, PROFILES), (followers.labels, LABELS)
        self._wall = wall
        self._starting = board.snapshot().inventory  # from before anything was known
        self._fault = ""
        self.history = History(began_s=wall())

    def publish(self, inventory: Inventory) -> None:
        """An inventory that differs from the one before."""
        before = self._board.snapshot().inventory
        first = before is self._starting
        self._board.put_inventory(inventory)
        # Of a node seen for the first time only what is wrong is news.
        found = changes(_bare(inventory) if first else before, inventory)
        # Who cannot be asked, and who can again, is told by the cache, and noted when it is.
        noted = [each for each in found if each.kind is not TransitionKind.ANSWER]
        self._log(inventory, noted, first=first)
        self._note(noted)
        self._tell(ALL if first else frozenset(each.kind for each in found))

    def not_refreshed(self, sentence: str) -> None:
        """Nobody can be asked. The cache says it once for the same sentence."""
        self._fault = sentence
        logger.bind(fault=sentence).warning("inventory not refreshed")
        self._note([Transition(kind=TransitionKind.ANSWER, what=f"not refreshed: {sentence}", worse=True)])

    def answered(self) -> None:
        """The source did, whatever it said."""
        if self._fault:
            self._fault = ""
            self._note([Transition(kind=TransitionKind.ANSWER, what="the driver answers again")])

    def module_changed(self, version: str) -> None:
        """Another kernel module is loaded, or none any more; who found out has logged it."""
        what = f"kernel module nvidia {version} is loaded" if version else "kernel module nvidia is not loaded any more"
        self._note([Transition(kind=TransitionKind.MODULE, what=what, worse=not version)])

    def _log(self, inventory: Inventory, noted: Iterable[Transition], *, first: bool) -> None:
        known = {"gpus": len(inventory.gpus), "inventory_number": self._board.snapshot().number}
        bound = logger.bind(**known, driver_version=inventory.driver_version)
        bound.log("INFO" if first or noted else "DEBUG", "inventory changed")
        for each in noted:
            if each.kind not in _SAID_BY_OTHERS:
                _log(each)

    def _note(self, transitions: Iterable[Transition]) -> None:
        self.history = self.history.having(transitions, self._wall())

    def _tell(self, kinds: frozenset[TransitionKind]) -> None:
        for look, news in self._news:
            if kinds & news:
                look()


def _bare(inventory: Inventory) -> Inventory:
    """The same with nothing wrong, and nothing said of health."""
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
    undescribed = transition.kind is TransitionKind.DESCRIPTION and transition.worse
    field, message = ("fault", "gpu cannot be described") if undescribed else ("reason", "node changed")
    bound.bind(**{field: transition.what}).log("WARNING" if transition.worse else "INFO", message)


REFRESH_S: Final = 60.0
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 30.0


class InventoryCache:
    """The last inventory of one source.

    publish: called with each inventory that differs from the one before in more than its age. on_fault: called with
    the sentence of a failure, once for the same sentence in a row. looked: called with each answer of the source, be it
    like the one before, and with when it was asked for, in seconds of `monotonic`. After a failure the last inventory
    stays `current` and its age grows; where there was none, an inventory with that fault is published.
    """

    def __init__(
        self,
        source: Source,
        publish: Callable[[Inventory], None],
        on_fault: Callable[[str], None],
        *,
        looked: Callable[[Inventory, float], None] = lambda _inventory, _began: None,
        refresh_s: float = REFRESH_S,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._publish = publish
        self._on_fault = on_fault
        self._looked = looked
        self._refresh_s = refresh_s
        self._wall = wall
        self._monotonic = monotonic
        self._answered: float | None = None  # by that clock
        self._sleep = sleep
        self._current: Inventory | None = None
        self._confirmed = False
        self._fault = ""
        self._failures = 0
        self._poked = asyncio.Event()
        self._ready = asyncio.Event()

    @property
    def current(self) -> Inventory | None:
        """The last inventory, with the time it was last confirmed; None before the first."""
        return self._current

    @property
    def fault(self) -> str:
        """Why the last refresh failed; empty when it did not."""
        return self._fault

    @property
    def confirmed(self) -> bool:
        """Whether the source has said anything itself; until then `current` is from somebody before us."""
        return self._confirmed

    def recall(self, inventory: Inventory) -> None:
        """Go by this inventory of an earlier process until the source answers. Its age is that of its contents."""
        self._current = inventory
        self._answered = self._monotonic() - max(0.0, self._wall() - inventory.taken_at)

    def age_s(self) -> float | None:
        """Seconds since the source last answered, whatever happened to the time of day; None where it never did.

        Of a recalled inventory: since it was taken, which is longer.
        """
        return None if self._answered is None else self._monotonic() - self._answered

    def poke(self) -> None:
        """Asks for a refresh now, without the rest of the pause."""
        self._poked.set()

    async def ready(self) -> None:
        """Returns once something was published, be it a fault."""
        await self._ready.wait()

    async def run(self) -> None:
        """Refreshes until cancelled, then closes the source."""
        try:
            while True:
                # Before the refresh: a poke during one may be about what that one did not see any more.
                self._poked.clear()
                await self.refresh()
                await self._rest(self._pause_s())
        finally:
            await self._source.close()

    async def refresh(self) -> None:
        """Asks the source once."""
        began = self._monotonic()
        try:
            inventory = await self._source.refresh()
        except InventoryError as error:
            self._failed(error)
        else:
            self._succeeded(inventory)
            self._looked(inventory, began)
        self._ready.set()

    def _succeeded(self, inventory: Inventory) -> None:
        if self._fault:
            logger.bind(attempt=self._failures).info("inventory refreshed again")
        self._fault, self._failures = "", 0
        self._answered = self._monotonic()
        if not self._confirmed and self._current and not self._current.fault:
            same = replace(self._current, taken_at=inventory.taken_at) == inventory
            logger.info("the last snapshot is confirmed" if same else "the last snapshot was not true any more")
        self._confirmed = True
        before, self._current = self._current, inventory
        if before is None or replace(before, taken_at=inventory.taken_at) != inventory:
            self._publish(inventory)

    def _failed(self, error: InventoryError) -> None:
        self._failures += 1
        if str(error) != self._fault:
            self._fault = str(error)
            self._on_fault(self._fault)
        before = self._current
        if before is None or before.fault:
            # Nothing better is known: at least which GPUs there are.
            self._current = Inventory(taken_at=self._wall(), fault=self._fault, unlisted=error.unlisted)
            if before is None or replace(before, taken_at=self._current.taken_at) != self._current:
                self._publish(self._current)

    def _pause_s(self) -> float:
        if not self._failures:
            return self._refresh_s
        doublings = min(self._failures - 1, 10)
        return min(FIRST_RETRY_S * (1 << doublings), LONGEST_RETRY_S, self._refresh_s)

    async def _rest(self, pause_s: float) -> None:
        """Sleeps, or until poked."""
        waits = [asyncio.ensure_future(self._sleep(pause_s)), asyncio.ensure_future(self._poked.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
