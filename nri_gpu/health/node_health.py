"""The health of a node's GPUs as a value: events and inventories go in, changes of state come out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from loguru import logger
from msgspec import Struct, field, json
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice
from nri_gpu.domain.health import WELL, GpuEvent, Health, HealthState, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.fabric import judged_signs, waiting, withheld
from nri_gpu.health.states import (
    NOT_LISTED,
    TROUBLE,
    Signal,
    is_of_mig_device,
    next_state,
    signal_of_event,
    signal_of_signs,
    unreadable_only,
)
from nri_gpu.policy.health import HealthSettings
from nri_gpu.system.storage import write_whole

LONG_AGO: Final = float("-inf")
ODDITIES: Final = frozenset({Signal.ODD, Signal.ODD_RESTED})
NO_UNITS: Final[frozenset[str]] = frozenset()
MISSING_MAX: Final = 256  # more than a machine has had in one boot
WHOLE: Final = "GPU-"  # how the UUID of a whole GPU begins

Shown = tuple[tuple[Sign, ...], str]  # signs, and NVML's message where they are of a call that failed
U = TypeVar("U", Gpu, MigDevice)
Verdict = tuple[Signal | None, str]  # the class of what was seen, and why


class Moment(Struct, frozen=True):
    """Now, on two clocks. clock_s: one that never jumps, for durations. wall_s: seconds since the epoch, for people."""

    clock_s: float
    wall_s: float


class MigPlace(Struct, frozen=True):
    """A MIG device of a GPU. index: in NVML's list. gpu_instance, compute_instance: events identify it by these."""

    uuid: GpuUuid
    index: int
    gpu_instance: int
    compute_instance: int


class GpuRecord(Struct, frozen=True, omit_defaults=True):
    """What is remembered of one GPU, or of a MIG device with an event of its own.

    trouble_s: when there last was trouble, on the clock. doubt_s: since when it cannot be read, on the clock; None:
    it can. place, bus_id, parts: its index, address and MIG devices when it could last be described.
    """

    health: Health = WELL
    trouble_s: float = LONG_AGO
    doubt_s: float | None = None
    place: str = ""
    bus_id: str = ""
    parts: tuple[MigPlace, ...] = ()

    @property
    def units(self) -> frozenset[str]:
        """UUIDs of its MIG devices."""
        return frozenset(part.uuid for part in self.parts)


class HealthChange(Struct, frozen=True):
    """A GPU or MIG device changed its state. place: `0`, or `0:1` of a MIG device; empty where it was never known."""

    uuid: GpuUuid
    before: HealthState
    now: Health
    place: str = ""


class NodeHealth(Struct, frozen=True):
    """All GPUs that were seen, those that are missing, and the MIG devices with events of their own."""

    records: Mapping[GpuUuid, GpuRecord] = field(default_factory=dict)

    def after_event(
        self, event: GpuEvent, rules: HealthSettings, now: Moment
    ) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        """After an event. One of a GPU that no inventory has shown changes nothing."""
        gpu = self.records.get(GpuUuid(event.uuid))
        signal, why = signal_of_event(event, rules)
        if gpu is None or signal is None:
            return self, ()
        uuid, record = GpuUuid(event.uuid), gpu
        if is_of_mig_device(event, rules) and (part := _part_of(gpu, event)):
            uuid, record = part.uuid, self.records.get(part.uuid, GpuRecord())
        # One incident often has several XIDs: a contained ECC error (94) and the row that is remapped for it (63).
        repeated = signal is Signal.INCIDENT and record.health.state is HealthState.SUSPECT
        if repeated and now.clock_s - record.trouble_s < rules.reprobe_s:
            return self, ()
        return self._with({uuid: (signal, why)}, now)

    def after_inventory(
        self, inventory: Inventory, rules: HealthSettings, now: Moment, held: frozenset[str] | None = NO_UNITS
    ) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        """After a refresh. An inventory with a fault says nothing about any GPU.

        held: UUIDs of the GPUs and MIG devices that containers hold; None: not known yet. A held GPU that is no longer
        there is lost; another one was only taken out.
        """
        if inventory.fault:
            return self, ()
        health, missing = self._with_present(inventory, held)
        waits = waiting(inventory, rules)
        shown = {gpu.uuid: (judged_signs(gpu, waits), gpu.unavailable) for gpu in inventory.gpus}
        doubts = {uuid: _with_doubt(health.records[uuid], signs, now) for uuid, (signs, _) in (shown | missing).items()}
        health = NodeHealth({**health.records, **doubts})
        shown |= {part.uuid: ((), "") for part in inventory.parts if part.uuid in health.records}
        verdicts = {uuid: _verdict(health.records[uuid], *seen, rules, now) for uuid, seen in (shown | missing).items()}
        # A missing GPU never counts as quiet.
        verdicts |= {uuid: _with_quiet(verdicts[uuid], health.records[uuid], rules, now) for uuid in shown}
        return health._with({uuid: (signal, why) for uuid, (signal, why) in verdicts.items() if signal}, now)

    def applied_to(self, inventory: Inventory, rules: HealthSettings) -> Inventory:
        """The inventory with each GPU's health, why some cannot be granted because of it, and the missing GPUs."""
        with_mig = (
            replace(gpu, mig=tuple(self._with_health(device, rules) for device in gpu.mig)) for gpu in inventory.gpus
        )
        waits = waiting(inventory, rules)
        gpus = tuple(withheld(self._with_health(gpu, rules), waits) for gpu in with_mig)
        faults = self._faults(inventory, rules)
        return replace(inventory, gpus=gpus, faults=faults)

    @property
    def has_unhealthy(self) -> bool:
        """Whether some GPU should be looked at again soon."""
        return any(record.health.state is not HealthState.HEALTHY for record in self.records.values())

    @property
    def withheld(self) -> Mapping[str, Health]:
        """GPUs and MIG devices that are not granted because of their health; a GPU's MIG devices share its fate."""
        found: dict[str, Health] = {}
        for uuid, record in self.records.items():
            if not record.health.grantable:
                found |= dict.fromkeys([uuid, *record.units], record.health)
        return found

    @property
    def places(self) -> Mapping[GpuUuid, tuple[str, str, tuple[MigPlace, ...]]]:
        """Where each GPU is and what MIG devices it has: a restart must not forget these."""
        return {uuid: (record.place, record.bus_id, record.parts) for uuid, record in self.records.items()}

    def _with_present(
        self, inventory: Inventory, held: frozenset[str] | None
    ) -> tuple[NodeHealth, dict[GpuUuid, Shown]]:
        """Adds the GPUs that are there, and drops those that were taken out. Returns also the missing ones' signs."""
        records = {gpu.uuid: _described(self.records.get(gpu.uuid, GpuRecord()), gpu) for gpu in inventory.gpus}
        unseen = {GpuUuid(unit) for unit in held or NO_UNITS if unit.startswith(WHOLE)} - records.keys()
        absent = dict.fromkeys(unseen, GpuRecord()) | self._absent(inventory)
        faults = _faults_by_gpu(absent, inventory.faults)
        taken: dict[str, GpuUuid] = {gpu.pci_bus_id: gpu.uuid for gpu in inventory.gpus}
        missing: dict[GpuUuid, Shown] = {}
        for uuid, record in absent.items():
            if record.bus_id in taken and held is not None and held.isdisjoint({uuid, *record.units}):
                reason = f"{taken[record.bus_id]} is at its address, {record.bus_id}"
                logger.bind(gpu_uuid=uuid, reason=reason).info("GPU was replaced, and is forgotten")
                continue
            # A GPU that is unhealthy does not become healthy by disappearing.
            healthy = record.health.state is HealthState.HEALTHY
            if fault := faults.get(uuid):
                missing[uuid] = ((fault.sign,) if fault.sign else (), fault.reason)
            elif not healthy or not record.units.isdisjoint(held or ()) or uuid in unseen:
                missing[uuid] = ((Sign.LOST,), NOT_LISTED)
            elif held is None:
                missing[uuid] = ((), "")
        if len(missing) > MISSING_MAX:
            newest = sorted(missing, key=lambda uuid: absent[uuid].trouble_s)[-MISSING_MAX:]
            missing = {uuid: missing[uuid] for uuid in newest}
        records |= {uuid: absent[uuid] for uuid in missing}
        parts = {part for record in records.values() for part in record.units}
        records |= {uuid: record for uuid, record in self.records.items() if uuid in parts}
        return NodeHealth(records), missing

    def _absent(self, inventory: Inventory) -> dict[GpuUuid, GpuRecord]:
        """GPUs that were seen before and are not described now."""
        present = {gpu.uuid for gpu in inventory.gpus}
        known = self.records.items()
        return {uuid: record for uuid, record in known if uuid.startswith(WHOLE) and uuid not in present}

    def _faults(self, inventory: Inventory, rules: HealthSettings) -> tuple[GpuFault, ...]:
        """The inventory's faults with the UUIDs of the GPUs they are about, and one for each other missing GPU."""
        absent = self._absent(inventory)
        uuids = {id(fault): uuid for uuid, fault in _faults_by_gpu(absent, inventory.faults).items()}
        found = []
        for fault in inventory.faults:
            uuid = uuids.get(id(fault))
            why = _unavailable(absent.pop(uuid).health, rules) if uuid else ""
            found.append(replace(fault, uuid=uuid or fault.uuid, reason=why or fault.reason))
        for uuid, record in absent.items():
            if record.place and (why := _unavailable(record.health, rules)):
                found.append(GpuFault(int(record.place), why, sign=Sign.LOST, uuid=uuid, pci_bus_id=record.bus_id))
        return tuple(found)

    def _with(
        self, signals: Mapping[GpuUuid, tuple[Signal, str]], now: Moment
    ) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        if not signals:
            return self, ()
        records, changes = dict(self.records), []
        for uuid, (signal, why) in signals.items():
            before = records.get(uuid, GpuRecord())
            records[uuid] = record = _after_signal(before, signal, why, now)
            if record.health.state is not before.health.state:
                changes.append(HealthChange(uuid, before.health.state, record.health, self._place(uuid)))
        return NodeHealth(records), tuple(changes)

    def _place(self, uuid: GpuUuid) -> str:
        """`0` of a GPU, `0:1` of a MIG device."""
        if uuid.startswith(WHOLE):
            return self.records[uuid].place if uuid in self.records else ""
        wholes = ((record, part) for record in self.records.values() for part in record.parts)
        return next((f"{record.place}:{part.index}" for record, part in wholes if part.uuid == uuid), "")

    def _with_health(self, unit: U, rules: HealthSettings) -> U:
        health = self.records.get(unit.uuid, GpuRecord()).health
        if health == unit.health:
            return unit
        return replace(unit, health=health, unavailable=_unavailable(health, rules) or unit.unavailable)


def _described(record: GpuRecord, gpu: Gpu) -> GpuRecord:
    """Notes its place and MIG devices. A GPU that NVML fails to describe keeps the MIG devices that it had."""
    parts = tuple(MigPlace(each.uuid, each.index, each.gpu_instance_id, each.compute_instance_id) for each in gpu.mig)
    kept = record.parts if gpu.unavailable and not parts else parts
    return replace(record, place=str(gpu.index), bus_id=gpu.pci_bus_id, parts=kept)


def _part_of(gpu: GpuRecord, event: GpuEvent) -> MigPlace | None:
    instances = (event.gpu_instance, event.compute_instance)
    return next((part for part in gpu.parts if (part.gpu_instance, part.compute_instance) == instances), None)


def _faults_by_gpu(absent: Mapping[GpuUuid, GpuRecord], faults: Iterable[GpuFault]) -> Mapping[GpuUuid, GpuFault]:
    """Which absent GPU each fault is about: by the fault's UUID or address, else by the GPU's last index."""
    found: dict[GpuUuid, GpuFault] = {}
    unnamed = []
    for fault in faults:
        candidates = (uuid for uuid, record in absent.items() if uuid not in found and _is_about(fault, uuid, record))
        if uuid := next(candidates, None):
            found[uuid] = fault
        elif not (fault.uuid or fault.pci_bus_id):
            unnamed.append(fault)
    left = [uuid for uuid in absent if uuid not in found]
    # Indices move when a GPU goes. With more GPUs than faults it is unknown which GPU was only taken out.
    return found | dict(zip(left, unnamed, strict=False)) if len(left) <= len(unnamed) else found


def _is_about(fault: GpuFault, uuid: GpuUuid, record: GpuRecord) -> bool:
    if fault.uuid:
        return uuid == fault.uuid
    return record.bus_id == fault.pci_bus_id if fault.pci_bus_id else record.place == str(fault.index)


def _with_doubt(record: GpuRecord, signs: tuple[Sign, ...], now: Moment) -> GpuRecord:
    if Sign.UNREADABLE not in signs:
        return record if record.doubt_s is None else replace(record, doubt_s=None)
    return replace(record, doubt_s=now.clock_s) if record.doubt_s is None else record


def _verdict(record: GpuRecord, signs: tuple[Sign, ...], message: str, rules: HealthSettings, now: Moment) -> Verdict:
    """The class of one GPU's signs. One that just became unreadable is odd and not yet bad: it may only be busy."""
    signal, why = signal_of_signs(signs, rules, message)
    fresh = record.doubt_s is not None and now.clock_s - record.doubt_s < rules.reprobe_s
    if signal is Signal.FATAL and fresh and record.health.grantable and unreadable_only(signs, rules):
        return Signal.ODD, why
    return signal, why


def _with_quiet(verdict: Verdict, record: GpuRecord, rules: HealthSettings, now: Moment) -> Verdict:
    """The verdict on a GPU that is not broken, by how long there was no trouble."""
    signal, why = verdict
    if signal is Signal.FATAL:
        return verdict
    quiet_s = now.clock_s - record.trouble_s
    rested = quiet_s >= rules.hold_down_s
    if signal is Signal.ODD:
        return Signal.ODD_RESTED if rested else signal, why
    if rested:
        return Signal.RESTED, why
    return Signal.CALM if quiet_s >= rules.reprobe_s else None, why


def _after_signal(record: GpuRecord, signal: Signal, why: str, now: Moment) -> GpuRecord:
    health, state = record.health, next_state(record.health.state, signal)
    # An odd sign is trouble as long as it shows, but not for a GPU that waits to be granted again.
    troubled = signal in TROUBLE or state is HealthState.SUSPECT is not health.state
    troubled = troubled or (signal in ODDITIES and health.state is HealthState.SUSPECT)
    trouble_s = now.clock_s if troubled else record.trouble_s
    if state is health.state:
        return replace(record, trouble_s=trouble_s)
    kept = health.why if state in (HealthState.RECOVERING, HealthState.HEALTHY) else why
    return replace(record, health=Health(state, now.wall_s, kept, health.changes + 1), trouble_s=trouble_s)


def _unavailable(health: Health, rules: HealthSettings) -> str:
    """Why it is not granted, the same text until its state changes; empty where it is granted."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(health.since))
    if health.state is HealthState.BAD:
        return f"bad since {since}: {health.why}"
    if health.state is HealthState.RECOVERING:
        return f"recovering since {since}, granted after {rules.hold_down_s:g} s without a fault: {health.why}"
    return ""


def load_health(file: Path) -> NodeHealth:
    """What was saved; nothing where that cannot be read, since refreshes and events show it again."""
    try:
        return json.decode(file.read_bytes(), type=NodeHealth)
    except FileNotFoundError:
        return NodeHealth()
    except (OSError, ValueError, RecursionError) as error:
        logger.bind(path=str(file), fault=str(error)).warning("saved health not read")
        return NodeHealth()


def save_health(file: Path, health: NodeHealth) -> None:
    """Some hundred bytes, on each change of a state."""
    try:
        write_whole(file, json.encode(health))
    except OSError as error:
        logger.bind(path=str(file), fault=str(error)).warning("health not saved")
