"""Keeps the board's inventory: each that is published, what changed with it, and who has to look because of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import Inventory
from nri_gpu.domain.health import WELL
from nri_gpu.domain.transition import History, Kind, Transition
from nri_gpu.inventory.changes import changes
from nri_gpu.log import logger
from nri_gpu.runtime.board import Board

# Which transitions are news to whom. What flaps (heat, say) is to nobody: a scan of the driver's files costs seconds.
DRIVER: Final = frozenset({Kind.ANSWER, Kind.DRIVER})
PROFILES: Final = frozenset({Kind.GPU, Kind.NUMBER})
LABELS: Final = frozenset({Kind.ANSWER, Kind.DRIVER, Kind.GPU, Kind.MIG, Kind.FACTS})
ALL: Final = frozenset(Kind)
_SAID_BY_OTHERS: Final = frozenset({Kind.HEALTH})  # `HealthKeeper`, when it makes up its mind


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
        noted = [each for each in found if each.kind is not Kind.ANSWER]
        self._log(inventory, noted, first=first)
        self._note(noted)
        self._tell(ALL if first else frozenset(each.kind for each in found))

    def not_refreshed(self, sentence: str) -> None:
        """Nobody can be asked. The cache says it once for the same sentence."""
        self._fault = sentence
        logger.bind(fault=sentence).warning("inventory not refreshed")
        self._note([Transition(kind=Kind.ANSWER, what=f"not refreshed: {sentence}", worse=True)])

    def answered(self) -> None:
        """The source did, whatever it said."""
        if self._fault:
            self._fault = ""
            self._note([Transition(kind=Kind.ANSWER, what="the driver answers again")])

    def module_changed(self, version: str) -> None:
        """Another kernel module is loaded, or none any more; who found out has logged it."""
        what = f"kernel module nvidia {version} is loaded" if version else "kernel module nvidia is not loaded any more"
        self._note([Transition(kind=Kind.MODULE, what=what, worse=not version)])

    def _log(self, inventory: Inventory, noted: Iterable[Transition], *, first: bool) -> None:
        known = {"gpus": len(inventory.gpus), "inventory_number": self._board.snapshot().number}
        bound = logger.bind(**known, driver_version=inventory.driver_version)
        bound.log("INFO" if first or noted else "DEBUG", "inventory changed")
        for each in noted:
            if each.kind not in _SAID_BY_OTHERS:
                _log(each)

    def _note(self, transitions: Iterable[Transition]) -> None:
        self.history = self.history.having(transitions, self._wall())

    def _tell(self, kinds: frozenset[Kind]) -> None:
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
    undescribed = transition.kind is Kind.DESCRIPTION and transition.worse
    field, message = ("fault", "gpu cannot be described") if undescribed else ("reason", "node changed")
    bound.bind(**{field: transition.what}).log("WARNING" if transition.worse else "INFO", message)
