"""The health of all GPUs of a node as a value: what was heard and seen goes in, changes of state come out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.codec import CodecError, canonical, decode
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice
from nri_gpu.domain.health import WELL, GpuEvent, Health, HealthState, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.states import GONE, TROUBLE, Rules, Signal, after, heard, looked, of_its_part, unsure

LONG_AGO: Final = float("-inf")
ODDITIES: Final = frozenset({Signal.ODD, Signal.ODD_RESTED})
NOBODY: Final[frozenset[str]] = frozenset()
MISSED_MAX: Final = 256  # more than a machine has had in one boot
WHOLE: Final = "GPU-"  # how the UUID of a whole GPU begins

Shown = tuple[tuple[Sign, ...], str]  # signs, and what NVML said where they are of a call that failed
Verdict = tuple[Signal | None, str]


class Moment(Struct, frozen=True):
    """Now, by two clocks. clock_s: one that never jumps, for durations. wall_s: seconds since the epoch, for people."""

    clock_s: float
    wall_s: float


class Part(Struct, frozen=True):
    """A MIG device of a GPU. index: its place in NVML's list. The others: what events tell it by."""

    uuid: GpuUuid
    index: int
    gpu_instance: int
    compute_instance: int


class Record(Struct, frozen=True):
    """One GPU, or a MIG device that something happened to.

    trouble_s: when there was trouble last, on the clock. doubt_s: since when looks cannot read it, on the clock; None:
    they can. place, bus_id, parts: where it was and what it was made of when it could be described last.
    """

    health: Health = WELL
    trouble_s: float = LONG_AGO
    doubt_s: float | None = None
    place: str = ""
    bus_id: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def units(self) -> frozenset[str]:
        """UUIDs of its MIG devices."""
        return frozenset(part.uuid for part in self.parts)


class Change(Struct, frozen=True):
    """A GPU came into another state, or a MIG device. place: its index, or both, as it was last; empty: never known."""

    uuid: GpuUuid
    before: HealthState
    now: Health
    place: str = ""


class Fleet(Struct, frozen=True):
    """All GPUs that were seen, those that are missed, and the MIG devices that something happened to."""

    records: Mapping[GpuUuid, Record] = field(default_factory=dict)

    def heard(self, event: GpuEvent, rules: Rules, now: Moment) -> tuple[Fleet, tuple[Change, ...]]:
        """After an event. One of a GPU that no look has shown says nothing."""
        gpu = self.records.get(GpuUuid(event.uuid))
        signal, why = heard(event, rules)
        if gpu is None or signal is None:
            return self, ()
        uuid, record = GpuUuid(event.uuid), gpu
        if of_its_part(event, rules) and (part := _part_of(gpu, event)):
            uuid, record = part.uuid, self.records.get(part.uuid, Record())
        # One incident often has several XIDs: a contained ECC error (94) and the row that is remapped for it (63).
        again = signal is Signal.INCIDENT and record.health.state is HealthState.SUSPECT
        if again and now.clock_s - record.trouble_s < rules.reprobe_s:
            return self, ()
        return self._with({uuid: (signal, why)}, now)

    def looked(
        self, inventory: Inventory, rules: Rules, now: Moment, held: frozenset[str] | None = NOBODY
    ) -> tuple[Fleet, tuple[Change, ...]]:
        """After a look at the node; one that showed nothing at all says nothing of any GPU.

        held: UUIDs of GPUs and MIG devices that somebody has; None: nobody told yet. One of those that is not there any
        more is lost, and was not just taken out.
        """
        if inventory.fault:
            return self, ()
        fleet, missed = self._knowing(inventory, held)
        shown = {gpu.uuid: (gpu.signs, gpu.unavailable) for gpu in inventory.gpus}
        doubted = {uuid: _doubted(fleet.records[uuid], signs, now) for uuid, (signs, _) in (shown | missed).items()}
        fleet = Fleet({**fleet.records, **doubted})
        shown |= {part.uuid: ((), "") for part in inventory.parts if part.uuid in fleet.records}
        verdicts = {uuid: _judged(fleet.records[uuid], *said, rules, now) for uuid, said in (shown | missed).items()}
        # Of what is missed nothing can be said to be quiet.
        verdicts |= {uuid: _quiet(verdicts[uuid], fleet.records[uuid], rules, now) for uuid in shown}
        return fleet._with({uuid: (signal, why) for uuid, (signal, why) in verdicts.items() if signal}, now)

    def dressed(self, inventory: Inventory, rules: Rules) -> Inventory:
        """The inventory with what is known here: health, who cannot be granted because of it, and who is missed."""
        gpus = tuple(self._dressed(gpu, rules) for gpu in inventory.gpus)
        faults = self._faults(inventory, rules)
        same = gpus == inventory.gpus and faults == inventory.faults
        return inventory if same else replace(inventory, gpus=gpus, faults=faults)

    @property
    def ailing(self) -> bool:
        """Whether there is a GPU to look at again soon."""
        return any(record.health.state is not HealthState.HEALTHY for record in self.records.values())

    @property
    def barred(self) -> Mapping[str, Health]:
        """GPUs and MIG devices that are granted to nobody because of how they are: a GPU's parts go down with it."""
        found: dict[str, Health] = {}
        for uuid, record in self.records.items():
            if not record.health.grantable:
                found |= dict.fromkeys([uuid, *record.units], record.health)
        return found

    @property
    def places(self) -> Mapping[GpuUuid, tuple[str, str, tuple[Part, ...]]]:
        """Where each is, and what it is made of: what a restart must not forget."""
        return {uuid: (record.place, record.bus_id, record.parts) for uuid, record in self.records.items()}

    def _knowing(self, inventory: Inventory, held: frozenset[str] | None) -> tuple[Fleet, dict[GpuUuid, Shown]]:
        """With what is there now, and what is missed: its signs and their reason. Without what was taken out."""
        records = {gpu.uuid: _described(self.records.get(gpu.uuid, Record()), gpu) for gpu in inventory.gpus}
        unseen = {GpuUuid(unit) for unit in held or NOBODY if unit.startswith(WHOLE)} - records.keys()
        missing = dict.fromkeys(unseen, Record()) | self._missing(inventory)
        blamed = _blamed(missing, inventory.faults)
        missed: dict[GpuUuid, Shown] = {}
        for uuid, record in missing.items():
            if fault := blamed.get(uuid):
                missed[uuid] = ((fault.sign,) if fault.sign else (), fault.reason)
            # What is not well does not get well by vanishing.
            elif (
                record.health.state is not HealthState.HEALTHY
                or not record.units.isdisjoint(held or ())
                or uuid in unseen
            ):
                missed[uuid] = ((Sign.LOST,), GONE)
            elif held is None:
                missed[uuid] = ((), "")
        if len(missed) > MISSED_MAX:
            newest = sorted(missed, key=lambda uuid: missing[uuid].trouble_s)[-MISSED_MAX:]
            missed = {uuid: missed[uuid] for uuid in newest}
        records |= {uuid: missing[uuid] for uuid in missed}
        parts = {part for record in records.values() for part in record.units}
        records |= {uuid: record for uuid, record in self.records.items() if uuid in parts}
        return Fleet(records), missed

    def _missing(self, inventory: Inventory) -> dict[GpuUuid, Record]:
        """GPUs that were seen before and are not described now."""
        present = {gpu.uuid for gpu in inventory.gpus}
        known = self.records.items()
        return {uuid: record for uuid, record in known if uuid.startswith(WHOLE) and uuid not in present}

    def _faults(self, inventory: Inventory, rules: Rules) -> tuple[GpuFault, ...]:
        """With the names of those that are missed, and with those that NVML says nothing of."""
        missing = self._missing(inventory)
        names = {id(fault): uuid for uuid, fault in _blamed(missing, inventory.faults).items()}
        found = []
        for fault in inventory.faults:
            uuid = names.get(id(fault))
            why = _unavailable(missing.pop(uuid).health, rules) if uuid else ""
            found.append(replace(fault, uuid=uuid or fault.uuid, reason=why or fault.reason))
        for uuid, record in missing.items():
            if record.place and (why := _unavailable(record.health, rules)):
                found.append(GpuFault(int(record.place), why, sign=Sign.LOST, uuid=uuid, pci_bus_id=record.bus_id))
        return tuple(found)

    def _with(self, signals: Mapping[GpuUuid, tuple[Signal, str]], now: Moment) -> tuple[Fleet, tuple[Change, ...]]:
        if not signals:
            return self, ()
        records, changes = dict(self.records), []
        for uuid, (signal, why) in signals.items():
            before = records.get(uuid, Record())
            records[uuid] = record = _next(before, signal, why, now)
            if record.health.state is not before.health.state:
                changes.append(Change(uuid, before.health.state, record.health, self._place(uuid)))
        return Fleet(records), tuple(changes)

    def _place(self, uuid: GpuUuid) -> str:
        """The index of a GPU, both of a MIG device."""
        if uuid.startswith(WHOLE):
            return self.records[uuid].place if uuid in self.records else ""
        wholes = ((record, part) for record in self.records.values() for part in record.parts)
        return next((f"{record.place}:{part.index}" for record, part in wholes if part.uuid == uuid), "")

    def _dressed(self, gpu: Gpu, rules: Rules) -> Gpu:
        mig = tuple(self._dressed_part(device, rules) for device in gpu.mig)
        health = self.records.get(gpu.uuid, Record()).health
        if health == gpu.health and mig == gpu.mig:
            return gpu
        return replace(gpu, health=health, mig=mig, unavailable=_unavailable(health, rules) or gpu.unavailable)

    def _dressed_part(self, device: MigDevice, rules: Rules) -> MigDevice:
        health = self.records.get(device.uuid, Record()).health
        if health == device.health:
            return device
        return replace(device, health=health, unavailable=_unavailable(health, rules) or device.unavailable)


def _described(record: Record, gpu: Gpu) -> Record:
    """With where it is now and what it is made of; one that could not be asked for its MIG devices still has them."""
    parts = tuple(Part(each.uuid, each.index, each.gpu_instance_id, each.compute_instance_id) for each in gpu.mig)
    kept = record.parts if gpu.unavailable and not parts else parts
    return replace(record, place=str(gpu.index), bus_id=gpu.pci_bus_id, parts=kept)


def _part_of(gpu: Record, event: GpuEvent) -> Part | None:
    told = (event.gpu_instance, event.compute_instance)
    return next((part for part in gpu.parts if (part.gpu_instance, part.compute_instance) == told), None)


def _blamed(missing: Mapping[GpuUuid, Record], faults: Iterable[GpuFault]) -> Mapping[GpuUuid, GpuFault]:
    """Which of the missing GPUs each fault is about: as far as it says itself, then by where they were last."""
    found: dict[GpuUuid, GpuFault] = {}
    unnamed = []
    for fault in faults:
        candidates = (uuid for uuid, record in missing.items() if uuid not in found and _same(uuid, record, fault))
        if uuid := next(candidates, None):
            found[uuid] = fault
        elif not (fault.uuid or fault.pci_bus_id):
            unnamed.append(fault)
    left = [uuid for uuid in missing if uuid not in found]
    # Indices move when a GPU goes. With more missing than faults nobody can tell who was only taken out.
    return found | dict(zip(left, unnamed, strict=False)) if len(left) <= len(unnamed) else found


def _same(uuid: GpuUuid, record: Record, fault: GpuFault) -> bool:
    if fault.uuid:
        return uuid == fault.uuid
    return record.bus_id == fault.pci_bus_id if fault.pci_bus_id else record.place == str(fault.index)


def _doubted(record: Record, signs: tuple[Sign, ...], now: Moment) -> Record:
    if Sign.UNREADABLE not in signs:
        return record if record.doubt_s is None else replace(record, doubt_s=None)
    return replace(record, doubt_s=now.clock_s) if record.doubt_s is None else record


def _judged(record: Record, signs: tuple[Sign, ...], said: str, rules: Rules, now: Moment) -> Verdict:
    """What a look at one GPU comes to, whatever was before; but that nothing is broken that may just be busy."""
    signal, why = looked(signs, rules, said)
    fresh = record.doubt_s is not None and now.clock_s - record.doubt_s < rules.reprobe_s
    if signal is Signal.FATAL and fresh and record.health.grantable and unsure(signs, rules):
        return Signal.ODD, why
    return signal, why


def _quiet(verdict: Verdict, record: Record, rules: Rules, now: Moment) -> Verdict:
    """The same of a look that found nothing broken, by how long there was no trouble."""
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


def _next(record: Record, signal: Signal, why: str, now: Moment) -> Record:
    health, state = record.health, after(record.health.state, signal)
    # What is odd is trouble as long as it is there, but for a GPU that waits to be granted again.
    troubled = signal in TROUBLE or state is HealthState.SUSPECT is not health.state
    troubled = troubled or (signal in ODDITIES and health.state is HealthState.SUSPECT)
    trouble_s = now.clock_s if troubled else record.trouble_s
    if state is health.state:
        return replace(record, trouble_s=trouble_s)
    kept = health.why if state in (HealthState.RECOVERING, HealthState.HEALTHY) else why
    return replace(record, health=Health(state, now.wall_s, kept, health.changes + 1), trouble_s=trouble_s)


def _unavailable(health: Health, rules: Rules) -> str:
    """Why it is not granted; the same words until its state changes. Empty where it is granted."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(health.since))
    if health.state is HealthState.BAD:
        return f"bad since {since}: {health.why}"
    if health.state is HealthState.RECOVERING:
        return f"recovering since {since}, granted after {rules.hold_down_s:g} s without a fault: {health.why}"
    return ""


def load_fleet(file: Path) -> Fleet:
    """What was known; nothing where it cannot be read, since every look and event tells again."""
    try:
        return decode(Fleet, json.loads(file.read_text(encoding="ascii")))
    except FileNotFoundError:
        return Fleet()
    except (OSError, CodecError, ValueError) as error:
        logger.bind(path=str(file), fault=str(error)).warning("health of before is not known")
        return Fleet()


def save_fleet(file: Path, fleet: Fleet) -> None:
    """Written whole or not at all; some hundred bytes, on each change of a state."""
    fresh = file.with_suffix(".new")
    try:
        fresh.write_text(canonical(fleet), encoding="ascii")
        fresh.replace(file)
    except OSError as error:
        logger.bind(path=str(file), fault=str(error)).warning("health not kept for the next start")
