"""The controller of the GPUs' health: takes events and inventories, publishes health, and acts on what turns bad."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from loguru import logger

from nri_gpu.domain.gpu import Gpu, GpuUuid, PciBusId, gpu_names
from nri_gpu.domain.health import EventType, GpuEvent, HealthNotes, HealthState, ScriptedEvent
from nri_gpu.domain.node import Inventory
from nri_gpu.health.affected import Stops, holders_of
from nri_gpu.health.event_child import EventChild, EventSink
from nri_gpu.health.gpu_record import HealthChange, Moment, reset_text
from nri_gpu.health.health_file import load_health, save_health
from nri_gpu.health.node_health import NO_UNITS, SOON, WHOLE, NodeHealth
from nri_gpu.health.states import meaning_of
from nri_gpu.health.xid_log import XidLog
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.health_settings import Events, HealthSettings, ResetBy
from nri_gpu.policy.model import DriverSettings
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.state import NodeState


class HealthController:
    """A controller for the life of the daemon.

    driver: where the driver is.
    file: what outlives a restart.
    publish: takes a changed inventory.
    refresh: asks for a refresh soon.
    simulated: events come from the topology file.
    moment: now, on a clock that goes on from one start to the next until a reboot.
    listener: factory, given the event sink.
    stops: factory, given the retry callback.
    refreshes_apart_s: least time between refreshes because of events, which can come by the thousand.
    module_load: which load of the driver's kernel module it is.
    changed: set when the policy, the ledger or a GPU's health changed.
    transitions: how often a GPU came into each state.
    xids: the XIDs that came.
    """

    def __init__(
        self,
        driver: DriverSettings,
        file: Path,
        node_state: NodeState,
        *,
        publish: Callable[[Inventory], None],
        refresh: Callable[[], None],
        simulated: bool,
        moment: Callable[[], Moment] | None = None,
        listener: Callable[[EventSink], EventChild] | None = None,
        stops: Callable[[Callable[[], None]], Stops] = Stops,
        refreshes_apart_s: float = 1.0,
        module_load: Callable[[], str] = str,
    ) -> None:
        self._file = file
        self._node_state = node_state
        self._publish = publish
        self._ask_for_refresh = refresh
        self._simulated = simulated
        self._moment = moment or _moment
        self._refreshes_apart_s = refreshes_apart_s
        self._module_load = module_load
        self._health, failures = load_health(file)
        self.xids = XidLog(failures)
        self._soon: frozenset[str] = NO_UNITS  # GPUs that are offered to nobody, as last published
        self._asked_for: float = float("-inf")  # on the loop's clock: the last refresh that an XID asked for
        self._seen: Inventory | None = None  # as the source returned it
        self._script: tuple[ScriptedEvent, ...] = ()
        self._began: float | None = None  # on the loop's clock: the first refresh of a simulated node
        self._shown: frozenset[str] = NO_UNITS  # GPUs and MIG devices of the last inventory
        self._held_at_refresh: frozenset[str] | None = None
        self.changed = asyncio.Event()
        self.transitions: Counter[HealthState] = Counter()
        self._stops = stops(self.changed.set)
        self._refreshing = False
        if listener is None and not simulated:
            listener = partial(EventChild, driver.root, driver.library_dirs, stage_dir=driver.stage_dir)
        self._listener = listener(EventSink(self.take_event, self._refresh_soon)) if listener else None

    @property
    def listeners(self) -> int:
        """Return how many event processes were started."""
        return self._listener.starts if self._listener else 0

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reprobe())
                group.create_task(self._follow())
                if self._listener:
                    group.create_task(self._listener.run())
        finally:
            self._stops.close()

    def with_health(self, inventory: Inventory, began_s: float | None = None) -> Inventory:
        """Take what a refresh showed. Return it with what is known of the GPUs' health.

        began_s: when the refresh began, on the moment's clock; None: now.
        """
        if not inventory.fault:
            self._seen, self._shown = inventory, frozenset(unit.uuid for unit in inventory.units)
        self._schedule(inventory.script)
        rules, self._held_at_refresh = self._settings, self._held()
        module, before = self._module_load(), self._health.records
        self._take(
            *self._health.after_inventory(
                inventory, rules, self._moment(), self._held_at_refresh, began_s=began_s, module=module
            )
        )
        _log_replaced({uuid: before[uuid].bus_id for uuid in before.keys() - self._health.records.keys()}, inventory)
        self.changed.set()  # bus ids may have changed
        return self._applied(inventory)

    def recalled(self, inventory: Inventory) -> Inventory:
        """Take an earlier process's inventory. Return it with the GPUs' health, the worse of what it and the file know.

        The file is newer: it is written with each change. Until it is known who holds what, nobody is offered a GPU
        that waits for its reset.
        """
        self._take(self._health.with_recalled(inventory, self._moment()), ())
        return self._health.applied_to(inventory, self._settings, NO_UNITS)

    def take_event(self, event: GpuEvent) -> None:
        """Take an event. It counts for the next container at once, without a refresh."""
        now, before = self._moment(), self._health.records.get(GpuUuid(event.uuid))
        module = self._module_load() if meaning_of(event, self._settings).reset else ""
        health, changes = self._health.after_event(event, self._settings, now, module)
        bound = logger.bind(gpu_uuid=event.uuid, event=f"{event.kind:#x}", xid=event.xid)
        bound.log("INFO" if changes else "DEBUG", "GPU event")
        failed = before is not None and self.xids.count(
            event, before.units | {event.uuid}, self._node_state.ledger, now
        )
        self._take(health, changes, save=failed)
        if changes:
            self._publish_again()
        if changes or event.kind != EventType.XID:
            self._refresh_soon()
        elif before is not None:
            self._ask_for_recovery_action()

    def follow_ledger(self) -> None:
        """Publish again if a GPU that waits for its reset has lost its holder: it is then offered to nobody."""
        if self._health.resets_soon and self._health.offered_to_nobody(self._held()) != self._soon:
            self._publish_again()

    def repaired(self, word: str) -> tuple[str, str]:
        """Take somebody's word that a GPU was reset.

        Return its UUID and what was due, or empty if there is no such GPU.

        word: its UUID, index or bus id.
        """
        names = gpu_names(word)
        for uuid, record in self._health.records.items():
            if uuid.startswith(WHOLE) and not names.isdisjoint({uuid, record.place, record.bus_id}):
                due = reset_text(record)
                if due:
                    self._take(self._health.after_repair(uuid), (), save=True)
                    self._publish_again()
                    self._refresh_soon()
                return uuid, due
        return "", ""

    def notes(self) -> Mapping[str, HealthNotes]:
        """Return what is known of each GPU beside its health."""
        now, proof = self._moment(), self._settings.reset is ResetBy.PROOF
        return {
            uuid: HealthNotes(
                reset=reset_text(record) if proof else "",
                soon=SOON if record.reset_soon else "",
                xid=last[0],
                xid_at_s=last[1],
                namespaces=self.xids.failures.namespaces(uuid, now.clock_s),
            )
            for uuid, record in self._health.records.items()
            for last in [self.xids.last(uuid)]
            if uuid.startswith(WHOLE)
        }

    @property
    def _settings(self) -> HealthSettings:
        return self._node_state.settings.health

    def _applied(self, inventory: Inventory) -> Inventory:
        held = self._held()
        self._soon = self._health.offered_to_nobody(held)
        return self._health.applied_to(inventory, self._settings, held)

    def _publish_again(self) -> None:
        if self._seen is not None:
            self._publish(self._applied(self._seen))

    def _take(self, health: NodeHealth, changes: tuple[HealthChange, ...], *, save: bool = False) -> None:
        moved, self._health = save or health.lasting != self._health.lasting, health
        if changes or moved:
            self.changed.set()
            save_health(self._file, self._health, self.xids.failures)
        for change in changes:  # told once it is kept: whoever reads it may end this process
            self.transitions[change.now.state] += 1
            _log(change)

    def _ask_for_recovery_action(self) -> None:
        """Refresh soon, but seldom: XIDs can come by the thousand, and a refresh costs the driver something."""
        if not any(gpu.recovery_action for gpu in (self._seen.gpus if self._seen else ())):
            return
        now, apart_s = asyncio.get_running_loop().time(), self._settings.reprobe_s
        if now - self._asked_for >= apart_s:
            self._asked_for = now
            self._refresh_soon()
        elif self._asked_for <= now:
            self._asked_for += apart_s
            asyncio.get_running_loop().call_at(self._asked_for, self._refresh_soon)

    def _refresh_soon(self) -> None:
        if self._refreshing:
            return
        self._refreshing = True
        asyncio.get_running_loop().call_later(self._refreshes_apart_s, self._refresh)

    def _refresh(self) -> None:
        self._refreshing = False
        self._ask_for_refresh()

    async def _reprobe(self) -> None:
        """Refresh more often while there is an unhealthy GPU."""
        while True:
            await asyncio.sleep(self._settings.reprobe_s)
            if self._health.has_unhealthy:
                self._ask_for_refresh()

    async def _follow(self) -> None:
        """Listen after each change to the GPUs that matter, and report or stop the containers on a withheld GPU."""
        while True:
            self.changed.clear()
            ledger = self._node_state.synchronized_ledger or Ledger()
            if self._listener:
                self._listener.listen(frozenset(gpu.pci_bus_id for gpu in self._listened(ledger)))
            self._stops.update(holders_of(self._health.withheld, ledger), self._node_state.settings)
            # A container holds what the last refresh neither showed nor knew to be held: the next does.
            known = self._shown | (self._held_at_refresh or NO_UNITS)
            if self._seen and any(use.load for uuid, use in ledger.usage().items() if uuid not in known):
                self._refresh_soon()
            await self.changed.wait()

    def _held(self) -> frozenset[str] | None:
        """Return the GPUs and MIG devices that containers hold, external allocations too, or None if not known yet."""
        ledger = self._node_state.synchronized_ledger
        return None if ledger is None else frozenset(uuid for uuid, use in ledger.usage().items() if use.load)

    def _listened(self, ledger: Ledger) -> Iterator[Gpu]:
        events, usage = self._settings.events, ledger.usage()
        for gpu in self._seen.gpus if self._seen and events is not Events.NONE else ():
            held = any(uuid in usage for uuid in (gpu.uuid, *(part.uuid for part in gpu.parts)))
            if held or events is Events.ALL:
                yield gpu

    def _schedule(self, script: tuple[ScriptedEvent, ...]) -> None:
        """Schedule a simulated node's events, each once, also those that an edit of the file added."""
        if not self._simulated:
            return
        loop = asyncio.get_running_loop()
        began = self._began = loop.time() if self._began is None else self._began
        added = Counter(script) - Counter(self._script)
        self._script = script
        for event in added.elements():
            loop.call_at(began + event.at_s, self._happen, event)

    def _happen(self, event: ScriptedEvent) -> None:
        if event not in self._script:  # an edit removed it
            return
        for gpu in self._seen.gpus if self._seen else ():
            if gpu.index == event.gpu:
                self.take_event(GpuEvent(gpu.uuid, event.kind, event.xid))


def _log(change: HealthChange) -> None:
    place = int(change.place) if change.place.isdecimal() else change.place or "?"
    bound = logger.bind(
        gpu_uuid=change.uuid,
        index=place,
        reason=change.now.why,
        state=change.now.state.value,
        before=change.before.value,
        changes=change.now.changes,
    )
    worse = change.now.state in (HealthState.BAD, HealthState.SUSPECT)
    bound.log("WARNING" if worse else "INFO", "GPU health changed")


def _log_replaced(forgotten: Mapping[str, str], inventory: Inventory) -> None:
    """Log the forgotten GPUs whose address has another GPU now. forgotten: UUID -> bus id."""
    now = {gpu.pci_bus_id: gpu.uuid for gpu in inventory.gpus}
    for uuid, bus_id in forgotten.items():
        if other := now.get(PciBusId(bus_id)):
            reason = f"{other} is at its address, {bus_id}"
            logger.bind(gpu_uuid=uuid, reason=reason).info("GPU was replaced, and is forgotten")


def _moment() -> Moment:
    return Moment(since_boot_s(), time.time())
