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
from nri_gpu.domain.gpu import Gpu, Inventory
from nri_gpu.domain.health import EventType, GpuEvent, ScriptedEvent, State
from nri_gpu.health.classes import Meaning, Rules
from nri_gpu.health.fleet import Change, Fleet, Moment
from nri_gpu.inventory.hearing import Ear, EventChild, Hearing
from nri_gpu.inventory.source import Source
from nri_gpu.policy.health import Events, HealthSettings, OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.verbs.health_file import load_fleet, save_fleet
from nri_gpu.verbs.stopping import stop_containers, warn_without_grpc

LOOKS_APART_S: Final = 1.0  # of looks for the sake of events, which can come by the thousand
_LEVELS: Final[Mapping[State, str]] = {State.BAD: "WARNING", State.SUSPECT: "WARNING"}


class Needs(Struct, frozen=True, kw_only=True):
    """What it needs of the daemon.

    policy: the one in force. ledger: who holds what. publish: an inventory is another one now. look: ask the source
    soon.
    """

    policy: Callable[[], Policy]
    ledger: Callable[[], Ledger]
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
        self._held_changed = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
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
                group.create_task(self._listen())
                if self._hearing:
                    group.create_task(self._hearing.run())
        finally:
            for task in self._stopping:
                task.cancel()

    def held_changed(self) -> None:
        """The ledger is another one; cheap, because it is said in the hook's path."""
        self._held_changed.set()

    def judged(self, inventory: Inventory) -> Inventory:
        """What a look showed, with what is known of the GPUs' health."""
        self._seen = inventory if not inventory.fault else self._seen
        self._play(inventory.script)
        self._held_changed.set()  # bus ids may be others
        rules = rules_of(self._settings)
        self._take(*self._fleet.looked(inventory, rules, self._moment()))
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
        self._fleet = fleet
        for change in changes:
            self._tell(change)
            if change.now.state is State.BAD:
                self._gone_bad(change)
        if changes:
            save_fleet(self._place.file, self._fleet)

    def _tell(self, change: Change) -> None:
        index = next((gpu.index for gpu in self._seen.gpus if gpu.uuid == change.uuid), "?") if self._seen else "?"
        said = {"gpu_uuid": change.uuid, "index": index, "reason": change.now.why, "state": change.now.state.value}
        bound = logger.bind(**said, before=change.before.value, changes=change.now.changes)
        bound.log(_LEVELS.get(change.now.state, "INFO"), "gpu health changed")

    def _gone_bad(self, change: Change) -> None:
        names = dict(_holders(self._needs.ledger(), self._units(change.uuid)))
        if not names:
            return
        bound = logger.bind(gpu_uuid=change.uuid, reason=change.now.why)
        if self._settings.containers is OnBad.REPORT:
            for container, name in names.items():
                bound.bind(pod_name=name, container_id=container).warning("container is on a bad gpu")
            return
        why = f"its GPU is bad: {change.now.why}"
        task = asyncio.create_task(stop_containers(names, self._needs.policy().guard, why))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _units(self, uuid: str) -> frozenset[str]:
        """A GPU, and the MIG devices that go down with it."""
        gpus = self._seen.gpus if self._seen else ()
        return frozenset({uuid, *(part.uuid for gpu in gpus if gpu.uuid == uuid for part in gpu.parts)})

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

    async def _listen(self) -> None:
        while True:
            self._held_changed.clear()
            if self._hearing:
                self._hearing.listen(frozenset(gpu.pci_bus_id for gpu in self._heard_of()))
            await self._held_changed.wait()

    def _heard_of(self) -> Iterator[Gpu]:
        """The GPUs whose errors are waited for."""
        events, usage = self._settings.events, self._needs.ledger().usage()
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


def _holders(ledger: Ledger, uuids: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Container id and name of those that hold one of them."""
    for entry in ledger.entries.values():
        if entry.holds and uuids.intersection(entry.grant.uuids):
            yield entry.grant.container_id, f"{entry.grant.namespace}/{entry.grant.pod_name}"


def _moment() -> Moment:
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
