"""The health of a node's GPUs as a value: events and inventories go in, changes of state come out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice
from nri_gpu.domain.health import EventType, GpuEvent, Health, HealthState, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.fabric import judged_signs, waiting, withheld
from nri_gpu.health.gpu_record import (
    DueReset,
    GpuRecord,
    HealthChange,
    MigPlace,
    Moment,
    Witness,
    Word,
    after_signal,
    after_word,
    confirmed,
    reset_text,
)
from nri_gpu.health.resets import after_answer, after_contained, after_memory
from nri_gpu.health.states import NOT_LISTED, Meaning, Signal, meaning_of, signal_of_signs, unreadable_only
from nri_gpu.health.xids import CONTAINED
from nri_gpu.policy.health_settings import HealthSettings, ResetBy

NO_UNITS: Final[frozenset[str]] = frozenset()
MISSING_MAX: Final = 256  # more than a machine has had in one boot
WHOLE: Final = "GPU-"  # how the UUID of a whole GPU begins
SOON: Final = "it had contained memory errors with a remap pending: reset it while no container holds it"

Shown = tuple[tuple[Sign, ...], str]  # signs, and NVML's message where they are of a call that failed
U = TypeVar("U", Gpu, MigDevice)
Verdict = tuple[Signal | None, str]  # the class of what was seen, and why


class NodeHealth(Struct, frozen=True):
    """The GPUs that were seen, those that are missing, and the MIG devices with events of their own."""

    records: Mapping[GpuUuid, GpuRecord] = field(default_factory=dict)

    def after_event(
        self, event: GpuEvent, rules: HealthSettings, now: Moment, module: str = ""
    ) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        """Return the health after an event. An event of a GPU that no inventory has shown changes nothing.

        module: of `after_inventory`.
        """
        uuid, meaning = GpuUuid(event.uuid), meaning_of(event, rules)
        if (gpu := self.records.get(uuid)) is None:
            return self, ()
        if event.kind == EventType.XID and event.xid == CONTAINED and event.xid not in rules.ignored:
            gpu = after_contained(gpu, rules, now)
        records = {**self.records, uuid: gpu}
        if meaning.signal:
            part = None if meaning.whole else _part_of(gpu, event)
            uuid = part.uuid if part else uuid
            record = _after_meaning(records.get(uuid, GpuRecord()), event, meaning, rules, now)
            if meaning.reset:
                pending = record.reset is not None and record.reset.pending
                record = replace(record, reset=DueReset(event.xid, now.clock_s, module, pending))
            records[uuid] = record
        return self._told(NodeHealth(records))

    def after_inventory(
        self,
        inventory: Inventory,
        rules: HealthSettings,
        now: Moment,
        held: frozenset[str] | None = NO_UNITS,
        *,
        began_s: float | None = None,
        module: str = "",
    ) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        """Return the health after a refresh. An inventory with a fault says nothing about any GPU.

        held: UUIDs of the GPUs and MIG devices that containers hold; None: not known yet. A held GPU that is no longer
        there is lost; any other GPU was only taken out. began_s: when the refresh began, on the clock; None: now.
        module: which load of the driver's kernel module it is, or empty if that is not known.
        """
        if inventory.fault:
            return self, ()
        health, missing = self._with_present(inventory, held)
        waits = waiting(inventory, rules)
        shown = {gpu.uuid: (judged_signs(gpu, waits), gpu.unavailable) for gpu in inventory.gpus}
        doubts = {uuid: _with_doubt(health.records[uuid], signs, now) for uuid, (signs, _) in (shown | missing).items()}
        health = NodeHealth({**health.records, **doubts})
        asked_s = now.clock_s if began_s is None else began_s
        health = health._answered(inventory, now, asked_s, module)
        shown |= {part.uuid: ((), "") for part in inventory.parts if part.uuid in health.records}
        verdicts = {uuid: _verdict(health.records[uuid], *seen, rules, now) for uuid, seen in (shown | missing).items()}
        # A missing GPU never counts as quiet.
        verdicts |= {uuid: _with_quiet(verdicts[uuid], health.records[uuid], rules, now) for uuid in shown}
        moved = {
            uuid: after_signal(health.records[uuid], signal, why, now)
            for uuid, (signal, why) in verdicts.items()
            if signal
        }
        return self._told(NodeHealth({**health.records, **moved}))

    def with_recalled(self, inventory: Inventory, now: Moment) -> NodeHealth:
        """Return the health with the bad GPUs of an earlier process's inventory, if they are known as well here.

        Whatever became of the health file, they are granted again once they were quiet for the hold-down.
        """
        records = dict(self.records)
        for gpu in inventory.gpus:
            units: tuple[Gpu | MigDevice, ...] = (gpu, *gpu.mig)
            for unit in units:
                record = self.records.get(unit.uuid, GpuRecord())
                if record.health.grantable and not unit.health.grantable:
                    known = _described(record, gpu) if unit is gpu else record
                    records[unit.uuid] = replace(known, health=unit.health, trouble_s=now.clock_s)
        return NodeHealth(records)

    def after_repair(self, uuid: GpuUuid) -> NodeHealth:
        """Return the health after somebody said that a GPU was reset.

        The GPU is granted again once it was quiet for the hold-down.
        """
        return NodeHealth({**self.records, uuid: replace(confirmed(self.records[uuid]), reset=None)})

    def applied_to(
        self, inventory: Inventory, rules: HealthSettings, held: frozenset[str] | None = NO_UNITS
    ) -> Inventory:
        """Return the inventory with each GPU's health, why some cannot be granted because of it, and the missing GPUs.

        held: as in `after_inventory`.
        """
        with_mig = (
            replace(gpu, mig=tuple(self._with_health(device, rules) for device in gpu.mig)) for gpu in inventory.gpus
        )
        waits, soon = waiting(inventory, rules), self.offered_to_nobody(held)
        well = (withheld(self._with_health(gpu, rules), waits) for gpu in with_mig)
        gpus = tuple(
            replace(gpu, unavailable=SOON) if gpu.uuid in soon and not gpu.unavailable else gpu for gpu in well
        )
        faults = self._faults(inventory, rules)
        return replace(inventory, gpus=gpus, faults=faults)

    def offered_to_nobody(self, held: frozenset[str] | None) -> frozenset[str]:
        """Return the GPUs that should be reset soon and that nobody holds, or nothing while that is not known."""
        soon = self.resets_soon.items()
        return frozenset(uuid for uuid, record in soon if held is not None and held.isdisjoint({uuid, *record.units}))

    @property
    def resets_soon(self) -> Mapping[GpuUuid, GpuRecord]:
        """Return the GPUs that should be reset as soon as nobody holds them."""
        return {uuid: record for uuid, record in self.records.items() if record.reset_soon}

    @property
    def has_unhealthy(self) -> bool:
        """Return whether some GPU should be looked at again soon."""
        records = self.records.values()
        return any(record.health.state is not HealthState.HEALTHY or record.reset_soon for record in records)

    @property
    def withheld(self) -> Mapping[str, Health]:
        """Return the GPUs and MIG devices not granted because of their health; a GPU's MIG devices share its fate."""
        found: dict[str, Health] = {}
        for uuid, record in self.records.items():
            if not record.health.grantable:
                found |= dict.fromkeys([uuid, *record.units], record.health)
        return found

    @property
    def lasting(self) -> Mapping[GpuUuid, object]:
        """Return what a restart must not forget of each GPU beside its state.

        It is where the GPU is, its MIG devices, contained errors and a pending remap, and a due reset.
        """
        return {
            uuid: (
                *(each.place, each.bus_id, each.parts, each.contained, each.remap),
                each.reset and replace(each.reset, at_s=0.0),
            )
            for uuid, each in self.records.items()
        }

    def _with_present(
        self, inventory: Inventory, held: frozenset[str] | None
    ) -> tuple[NodeHealth, dict[GpuUuid, Shown]]:
        """Add the GPUs that are there, and drop those that were taken out. Return also the missing GPUs' signs."""
        records = {gpu.uuid: _described(self.records.get(gpu.uuid, GpuRecord()), gpu) for gpu in inventory.gpus}
        unseen = {GpuUuid(unit) for unit in held or NO_UNITS if unit.startswith(WHOLE)} - records.keys()
        absent = dict.fromkeys(unseen, GpuRecord()) | self._absent(inventory)
        faults = _faults_by_gpu(absent, inventory.faults)
        taken: set[str] = {gpu.pci_bus_id for gpu in inventory.gpus}
        missing: dict[GpuUuid, Shown] = {}
        for uuid, record in absent.items():
            if record.bus_id in taken and held is not None and held.isdisjoint({uuid, *record.units}):
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
        """Return the GPUs that were seen before and are not described now."""
        present = {gpu.uuid for gpu in inventory.gpus}
        known = self.records.items()
        return {uuid: record for uuid, record in known if uuid.startswith(WHOLE) and uuid not in present}

    def _faults(self, inventory: Inventory, rules: HealthSettings) -> tuple[GpuFault, ...]:
        """Return the inventory's faults with the UUIDs of their GPUs, and a fault for each other missing GPU."""
        absent = self._absent(inventory)
        uuids = {id(fault): uuid for uuid, fault in _faults_by_gpu(absent, inventory.faults).items()}
        found = []
        for fault in inventory.faults:
            uuid = uuids.get(id(fault))
            why = _unavailable(absent.pop(uuid), rules) if uuid else ""
            found.append(replace(fault, uuid=uuid or fault.uuid, reason=why or fault.reason))
        for uuid, record in absent.items():
            if record.place and (why := _unavailable(record, rules)):
                found.append(GpuFault(int(record.place), why, sign=Sign.LOST, uuid=uuid, pci_bus_id=record.bus_id))
        return tuple(found)

    def _answered(self, inventory: Inventory, now: Moment, asked_s: float, module: str) -> NodeHealth:
        """Apply what proves that a reset was done, or that none is needed."""
        records = dict(self.records)
        for gpu in inventory.gpus:
            records[gpu.uuid] = after_answer(after_memory(records[gpu.uuid], gpu), gpu, now, asked_s, module)
            for part in gpu.mig:
                if part.uuid in records:
                    records[part.uuid] = after_answer(records[part.uuid], gpu, now, asked_s, module)
        return NodeHealth(records)

    def _told(self, after: NodeHealth) -> tuple[NodeHealth, tuple[HealthChange, ...]]:
        """Return the health after this one, each change of state counted, and the changes.

        A state that left and came back within one event or refresh did not change.
        """
        records, changes = dict(after.records), []
        for uuid, record in after.records.items():
            before = self.records.get(uuid, GpuRecord()).health
            if record.health.state is not before.state:
                now = replace(record.health, changes=before.changes + 1)
                records[uuid] = replace(record, health=now)
                changes.append(HealthChange(uuid, before.state, now, after._place(uuid)))
        return NodeHealth(records), tuple(changes)

    def _place(self, uuid: GpuUuid) -> str:
        """Return `0` of a GPU, `0:1` of a MIG device."""
        if uuid.startswith(WHOLE):
            return self.records[uuid].place if uuid in self.records else ""
        wholes = ((record, part) for record in self.records.values() for part in record.parts)
        return next((f"{record.place}:{part.index}" for record, part in wholes if part.uuid == uuid), "")

    def _with_health(self, unit: U, rules: HealthSettings) -> U:
        record = self.records.get(unit.uuid, GpuRecord())
        if record.health == unit.health:
            return unit
        return replace(unit, health=record.health, unavailable=_unavailable(record, rules) or unit.unavailable)


def _described(record: GpuRecord, gpu: Gpu) -> GpuRecord:
    """Note its place and MIG devices. A GPU that NVML fails to describe keeps the MIG devices that it had."""
    parts = tuple(MigPlace(each.uuid, each.index, each.gpu_instance_id, each.compute_instance_id) for each in gpu.mig)
    kept = record.parts if gpu.unavailable and not parts else parts
    return replace(record, place=str(gpu.index), bus_id=gpu.pci_bus_id, parts=kept)


def _part_of(gpu: GpuRecord, event: GpuEvent) -> MigPlace | None:
    instances = (event.gpu_instance, event.compute_instance)
    return next((part for part in gpu.parts if (part.gpu_instance, part.compute_instance) == instances), None)


def _faults_by_gpu(absent: Mapping[GpuUuid, GpuRecord], faults: Iterable[GpuFault]) -> Mapping[GpuUuid, GpuFault]:
    """Map absent GPUs to the faults about them: by the fault's UUID or address, else by the GPU's last index."""
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
    """Return the class of one GPU's signs.

    A GPU that just became unreadable is odd and not yet bad: it may only be busy.
    """
    signal, why = signal_of_signs(signs, rules, message)
    fresh = record.doubt_s is not None and now.clock_s - record.doubt_s < rules.reprobe_s
    if signal is Signal.FATAL and fresh and record.health.grantable and unreadable_only(signs, rules):
        return Signal.ODD, why
    return signal, why


def _with_quiet(verdict: Verdict, record: GpuRecord, rules: HealthSettings, now: Moment) -> Verdict:
    """Adjust the verdict on a GPU that is not broken by how long there was no trouble."""
    signal, why = verdict
    if signal is Signal.FATAL or (record.reset and rules.reset is ResetBy.PROOF):
        return verdict
    quiet_s = now.clock_s - record.trouble_s
    rested = quiet_s >= rules.hold_down_s
    if signal is Signal.ODD:
        return Signal.ODD_RESTED if rested else signal, why
    if rested:
        return Signal.RESTED, why
    return Signal.CALM if quiet_s >= rules.reprobe_s else None, why


def _after_meaning(
    record: GpuRecord, event: GpuEvent, meaning: Meaning, rules: HealthSettings, now: Moment
) -> GpuRecord:
    """Return the record after an event that means something."""
    if meaning.signal is None:
        return record
    word = Word(meaning.signal, meaning.why, now.clock_s)
    if meaning.word:
        return after_word(record, Witness.CATALOGUE, word, now)
    if event.kind == EventType.DOUBLE_BIT_ECC:
        contained = now.clock_s - record.contained_s < rules.reprobe_s
        return record if contained else after_word(record, Witness.DOUBLE_BIT, word, now)
    if meaning.signal is Signal.INCIDENT:
        return _after_incident(record, meaning.why, rules, now)
    return after_signal(record, meaning.signal, meaning.why, now)


def _after_incident(record: GpuRecord, why: str, rules: HealthSettings, now: Moment) -> GpuRecord:
    """Count incidents that come together as one, as those of a memory error and the row that is remapped for it do."""
    since_s = now.clock_s - record.incident_s
    suspect = record.health.state is HealthState.SUSPECT
    if suspect and since_s < rules.reprobe_s:
        return record
    # Signs and unclear events are no incidents: the second incident makes it bad.
    first = suspect and since_s >= rules.hold_down_s
    record = replace(record, incident_s=now.clock_s)
    return after_signal(record, Signal.UNCLEAR if first else Signal.INCIDENT, why, now)


def _unavailable(record: GpuRecord, rules: HealthSettings) -> str:
    """Return why it is not granted, in the same text until that changes, or empty."""
    health = record.health
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(health.since))
    if health.state is HealthState.BAD:
        due = reset_text(record) if rules.reset is ResetBy.PROOF else ""
        return f"bad since {since}: {health.why}{due and f'; {due}'}"
    if health.state is HealthState.RECOVERING:
        return f"recovering since {since}, granted after {rules.hold_down_s:g} s without a fault: {health.why}"
    return ""
