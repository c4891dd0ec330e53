"""Keeps the health of the node's GPUs: hears their errors, judges every look at them, and acts on what turns bad."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import EventType, GpuEvent, HealthState, ScriptedEvent
from nri_gpu.domain.node import Inventory
from nri_gpu.health.fleet import NOBODY, Change, Fleet, Moment, load_fleet, save_fleet
from nri_gpu.health.listener import Ear, EventChild, Hearing
from nri_gpu.health.states import Meaning, Rules
from nri_gpu.health.stops import Stops, holders_of
from nri_gpu.inventory.source import Source
from nri_gpu.policy.health import Events, HealthSettings, OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.system.cri import warn_without_grpc

LOOKS_APART_S: Final = 1.0  # of looks for the sake of events, which can come by the thousand
_LEVELS: Final[Mapping[HealthState, str]] = {HealthState.BAD: "WARNING", HealthState.SUSPECT: "WARNING"}


class Needs(Struct, frozen=True, kw_only=True):
    """What it needs of the daemon.

    policy: the one in force. ledger: who holds what; None before the runtime has told. publish: an inventory is another
    one now. look: ask the source soon.
    """

    policy: Callable[[], Policy]
    ledger: Callable[[], Ledger | None]
    publish: Callable[[Inventory], None]
    look: Callable[[], None]


class HealthPlace(Struct, frozen=True, kw_only=True):
    """Where the driver is, and the file that outlives a restart. simulated: events are those of the script."""

    driver_root: str
    library_dirs: tuple[str, ...]
    file: Path
    simulated: bool


class Judged:
    """A source whose inventories say how the GPUs are."""

    def __init__(self, source: Source, judge: Callable[[Inventory], Inventory]) -> None:
        self._source = source
        self._judge = judge

    async def refresh(self) -> Inventory:
        """Raises: InventoryError."""
        return self._judge(await self._source.refresh())

    async def close(self) -> None:
        """The source's."""
        await self._source.close()


class HealthKeeper:
    """One for the life of the daemon.

    moment: now; its clock must go on from one start to the next in one boot. hearing: who waits for events.
    """

    def __init__(
        self,
        place: HealthPlace,
        needs: Needs,
        moment: Callable[[], Moment] | None = None,
        hearing: Callable[[Ear], Hearing] | None = None,
    ) -> None:
        self._place = place
        self._needs = needs
        self._moment = moment or _moment
        self._fleet = load_fleet(place.file)
        self._seen: Inventory | None = None  # as the source told it
        self._script: tuple[ScriptedEvent, ...] = ()
        self._began: float | None = None  # by the loop's clock: when a simulated node was first looked at
        self._shown: frozenset[str] = NOBODY  # GPUs and MIG devices in it
        self._judged_for: frozenset[str] | None = None  # what was held at the last look
        self._changed = asyncio.Event()
        self._stops = Stops(self._changed.set)
        self._looking = False
        if hearing is None and not place.simulated:
            hearing = partial(EventChild, place.driver_root, place.library_dirs)
        self._hearing = hearing(Ear(self.heard, self._look_soon)) if hearing else None

    def watching(self, source: Source) -> Source:
        """The source, judged."""
        return Judged(source, self.judged)

    async def run(self) -> None:
        """Until cancelled."""
        if self._settings.containers is OnBad.STOP:
            warn_without_grpc("health.containers")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reprobe())
                group.create_task(self._tend())
                if self._hearing:
                    group.create_task(self._hearing.run())
        finally:
            self._stops.close()

    def held_changed(self) -> None:
        """The ledger is another one; cheap, because it is said in the hook's path."""
        self._changed.set()

    def policy_changed(self) -> None:
        """Policy is another one."""
        self._changed.set()

    def judged(self, inventory: Inventory) -> Inventory:
        """What a look showed, with what is known of the GPUs' health."""
        if not inventory.fault:
            self._seen, self._shown = inventory, frozenset(unit.uuid for unit in inventory.units)
        self._play(inventory.script)
        rules, self._judged_for = rules_of(self._settings), self._held()
        self._take(*self._fleet.looked(inventory, rules, self._moment(), self._judged_for))
        self._changed.set()  # bus ids may be others
        return self._fleet.dressed(inventory, rules)

    def heard(self, event: GpuEvent) -> None:
        """Something happened to a GPU; what it means holds for the next container, without another look."""
        rules = rules_of(self._settings)
        fleet, changes = self._fleet.heard(event, rules, self._moment())
        bound = logger.bind(gpu_uuid=event.uuid, event=f"{event.kind:#x}", xid=event.xid)
        bound.log("INFO" if changes else "DEBUG", "gpu event")
        self._take(fleet, changes)
        if changes and self._seen is not None:
            self._needs.publish(self._fleet.dressed(self._seen, rules))
        # An application can make XIDs by the thousand, and a look costs the driver something.
        if changes or event.kind != EventType.XID:
            self._look_soon()

    @property
    def _settings(self) -> HealthSettings:
        return self._needs.policy().health

    def _take(self, fleet: Fleet, changes: tuple[Change, ...]) -> None:
        moved, self._fleet = fleet.places != self._fleet.places, fleet
        for change in changes:
            self._tell(change)
        if changes or moved:
            self._changed.set()
            save_fleet(self._place.file, self._fleet)

    def _tell(self, change: Change) -> None:
        place = int(change.place) if change.place.isdecimal() else change.place or "?"
        said = {"gpu_uuid": change.uuid, "index": place, "reason": change.now.why, "state": change.now.state.value}
        bound = logger.bind(**said, before=change.before.value, changes=change.now.changes)
        bound.log(_LEVELS.get(change.now.state, "INFO"), "gpu health changed")

    def _look_soon(self) -> None:
        if self._looking:
            return
        self._looking = True
        asyncio.get_running_loop().call_later(LOOKS_APART_S, self._look)

    def _look(self) -> None:
        self._looking = False
        self._needs.look()

    async def _reprobe(self) -> None:
        """Look more often while there is a GPU that is not well."""
        while True:
            await asyncio.sleep(self._settings.reprobe_s)
            if self._fleet.ailing:
                self._needs.look()

    async def _tend(self) -> None:
        """Whenever something changed: listen to whom it concerns, and see to who is on what is bad."""
        while True:
            self._changed.clear()
            if self._hearing:
                self._hearing.listen(frozenset(gpu.pci_bus_id for gpu in self._heard_of()))
            self._stops.tend(holders_of(self._fleet.barred, self._needs.ledger() or Ledger()), self._needs.policy())
            # Somebody has what the last look did not show, and did not ask about: the next one does.
            if self._seen and (self._held() or NOBODY) - self._shown - (self._judged_for or NOBODY):
                self._look_soon()
            await self._changed.wait()

    def _held(self) -> frozenset[str] | None:
        """GPUs and MIG devices that somebody has, be it by our hand or not; None where that is not known yet."""
        ledger = self._needs.ledger()
        return None if ledger is None else frozenset(uuid for uuid, use in ledger.usage().items() if use.load)

    def _heard_of(self) -> Iterator[Gpu]:
        """The GPUs whose errors are waited for."""
        events, usage = self._settings.events, (self._needs.ledger() or Ledger()).usage()
        for gpu in self._seen.gpus if self._seen and events is not Events.NONE else ():
            held = any(uuid in usage for uuid in (gpu.uuid, *(part.uuid for part in gpu.parts)))
            if held or events is Events.ALL:
                yield gpu

    def _play(self, script: tuple[ScriptedEvent, ...]) -> None:
        """Have a simulated node's events happen, those of an edited file too: each once."""
        if not self._place.simulated:
            return
        loop = asyncio.get_running_loop()
        began = self._began = loop.time() if self._began is None else self._began
        added = Counter(script) - Counter(self._script)
        self._script = script
        for event in added.elements():
            loop.call_at(began + event.at_s, self._happen, event)

    def _happen(self, event: ScriptedEvent) -> None:
        if event not in self._script:  # an edit took it out
            return
        for gpu in self._seen.gpus if self._seen else ():
            if gpu.index == event.gpu:
                self.heard(GpuEvent(gpu.uuid, event.kind, event.xid))


def rules_of(settings: HealthSettings) -> Rules:
    """Policy, in the words of `health/`."""
    return Rules(
        ignored_xids=settings.ignored_xids,
        fatal_xids=settings.fatal_xids,
        other_xids=Meaning(settings.other_xids.value),
        fatal_signs=settings.fatal_signs,
        suspect_signs=settings.suspect_signs,
        hold_down_s=settings.hold_down_s,
        reprobe_s=settings.reprobe_s,
    )


def _moment() -> Moment:
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
