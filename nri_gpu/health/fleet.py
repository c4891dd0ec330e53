"""The health of all GPUs of a node as a value: what was heard and seen goes in, changes of state come out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, GpuUuid, Inventory
from nri_gpu.domain.health import WELL, GpuEvent, Health, Sign, State
from nri_gpu.health.classes import SIGN_WORDS, Rules, heard, looked
from nri_gpu.health.table import TROUBLE, Signal, after

LONG_AGO: Final = float("-inf")
ODDITIES: Final = frozenset({Signal.ODD, Signal.ODD_RESTED})


class Moment(Struct, frozen=True):
    """Now, by two clocks. clock_s: one that never jumps, for durations. wall_s: seconds since the epoch, for people."""

    clock_s: float
    wall_s: float


class Record(Struct, frozen=True):
    """One GPU. trouble_s: when there was trouble last, on the clock."""

    health: Health = WELL
    trouble_s: float = LONG_AGO


class Change(Struct, frozen=True):
    """A GPU came into another state."""

    uuid: GpuUuid
    before: State
    now: Health


class Fleet(Struct, frozen=True):
    """All GPUs that were seen, and those that are missed."""

    records: Mapping[GpuUuid, Record] = field(default_factory=dict)

    def heard(self, event: GpuEvent, rules: Rules, now: Moment) -> tuple[Fleet, tuple[Change, ...]]:
        """After an event; of a GPU that nobody knows yet, too."""
        signal, why = heard(event, rules)
        record = self.records.get(GpuUuid(event.uuid), Record())
        # One incident often has several XIDs: a contained ECC error (94) and the row that is remapped for it (63).
        again = signal is Signal.INCIDENT and record.health.state is State.SUSPECT
        if signal is None or (again and now.clock_s - record.trouble_s < rules.reprobe_s):
            return self, ()
        return self._with({GpuUuid(event.uuid): (signal, why)}, now)

    def looked(self, inventory: Inventory, rules: Rules, now: Moment) -> tuple[Fleet, tuple[Change, ...]]:
        """After a look at the node. One that showed nothing at all says nothing of any GPU."""
        if inventory.fault:
            return self, ()
        fleet = self._knowing(inventory)
        signals = {gpu.uuid: found for gpu in inventory.gpus if (found := fleet._seen(gpu, rules, now))}
        gone = fleet.records.keys() - {gpu.uuid for gpu in inventory.gpus}
        return fleet._with(signals | {uuid: (Signal.FATAL, SIGN_WORDS[Sign.LOST]) for uuid in gone}, now)

    def dressed(self, inventory: Inventory, rules: Rules) -> Inventory:
        """The inventory with what is known here: health, and who cannot be granted because of it."""
        gpus = tuple(self._dressed(gpu, rules) for gpu in inventory.gpus)
        return inventory if gpus == inventory.gpus else replace(inventory, gpus=gpus)

    @property
    def ailing(self) -> bool:
        """Whether there is a GPU to look at again soon."""
        return any(record.health.state is not State.HEALTHY for record in self.records.values())

    def _knowing(self, inventory: Inventory) -> Fleet:
        """With what is there now, and without what was taken out of the machine while it was well."""
        present = {gpu.uuid: self.records.get(gpu.uuid, Record()) for gpu in inventory.gpus}
        # What cannot be described may be one that was there; and what is not well does not get well by vanishing.
        missed = {
            uuid: record
            for uuid, record in self.records.items()
            if inventory.faults or record.health.state is not State.HEALTHY
        }
        return Fleet(missed | present)

    def _seen(self, gpu: Gpu, rules: Rules, now: Moment) -> tuple[Signal, str] | None:
        """What a look at one GPU comes to."""
        signal, why = looked(gpu.signs, rules)
        if signal is not Signal.FATAL:
            signal = _quiet(signal, now.clock_s - self.records[gpu.uuid].trouble_s, rules)
        return None if signal is None else (signal, why)

    def _with(self, signals: Mapping[GpuUuid, tuple[Signal, str]], now: Moment) -> tuple[Fleet, tuple[Change, ...]]:
        if not signals:
            return self, ()
        records, changes = dict(self.records), []
        for uuid, (signal, why) in signals.items():
            before = records.get(uuid, Record())
            records[uuid] = record = _next(before, signal, why, now)
            if record.health.state is not before.health.state:
                changes.append(Change(uuid, before.health.state, record.health))
        return Fleet(records), tuple(changes)

    def _dressed(self, gpu: Gpu, rules: Rules) -> Gpu:
        record = self.records.get(gpu.uuid)
        if record is None or record.health == gpu.health:
            return gpu
        health = record.health
        return replace(gpu, health=health, unavailable=_unavailable(health, rules) or gpu.unavailable)


def _quiet(signal: Signal | None, quiet_s: float, rules: Rules) -> Signal | None:
    """A look that found nothing broken, by how long there was no trouble."""
    rested = quiet_s >= rules.hold_down_s
    if signal is Signal.ODD:
        return Signal.ODD_RESTED if rested else signal
    if rested:
        return Signal.RESTED
    return Signal.CALM if quiet_s >= rules.reprobe_s else None


def _next(record: Record, signal: Signal, why: str, now: Moment) -> Record:
    health, state = record.health, after(record.health.state, signal)
    # What is odd is trouble as long as it is there, but for a GPU that waits to be granted again.
    troubled = signal in TROUBLE or state is State.SUSPECT is not health.state
    troubled = troubled or (signal in ODDITIES and health.state is State.SUSPECT)
    trouble_s = now.clock_s if troubled else record.trouble_s
    if state is health.state:
        return Record(health, trouble_s)
    kept = health.why if state in (State.RECOVERING, State.HEALTHY) else why
    return Record(Health(state, now.wall_s, kept, health.changes + 1), trouble_s)


def _unavailable(health: Health, rules: Rules) -> str:
    """Why it is not granted; the same words until its state changes. Empty where it is granted."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(health.since))
    if health.state is State.BAD:
        return f"bad since {since}: {health.why}"
    if health.state is State.RECOVERING:
        return f"recovering since {since}, granted after {rules.hold_down_s:g} s without a fault: {health.why}"
    return ""
