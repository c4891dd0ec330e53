"""What is remembered of one GPU, and how a signal changes it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import WELL, Health, HealthState
from nri_gpu.health.states import ODDITIES, TROUBLE, Signal, next_state
from nri_gpu.health.xids import xid_name

LONG_AGO: Final = float("-inf")
CONTAINED_MAX: Final = 3  # contained errors beside a pending remap, and the reset should not wait


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


class Witness(StrEnum):
    """Whose word it is that an event means trouble."""

    CATALOGUE = "catalogue"  # taken back by a recovery action of the driver
    DOUBLE_BIT = "double-bit"  # taken back by a contained ECC error


class Word(Struct, frozen=True):
    """Trouble on the word of an event alone. at_s: of the last such event, on the clock."""

    signal: Signal
    why: str
    at_s: float


class Course(Struct, frozen=True, omit_defaults=True):
    """A state of health, and when there last was trouble, on the clock."""

    health: Health = WELL
    trouble_s: float = LONG_AGO


class DueReset(Struct, frozen=True, omit_defaults=True):
    """A reset that an XID asks for. at_s: of the XID, on the clock.

    module: which load of the driver's kernel module it happened to. pending: a check has shown a pending remap since.
    """

    xid: int
    at_s: float
    module: str = ""
    pending: bool = False


class GpuRecord(Struct, frozen=True, omit_defaults=True):
    """What is remembered of one GPU, or of a MIG device with an event of its own.

    An earlier version reads the first six fields alone. trouble_s: when there last was trouble, on the clock. doubt_s:
    since when it cannot be read, on the clock; None: it can. place, bus_id, parts: its index, address and MIG devices
    when it could last be described. incident_s: of the last incident, on the clock. words: what may be taken back;
    without: its course without these. reset: None where none is due. contained_s: of the last contained ECC error, on
    the clock; contained: how many there were since a remap is pending (remap) on a driver without recovery actions.
    """

    health: Health = WELL
    trouble_s: float = LONG_AGO
    doubt_s: float | None = None
    place: str = ""
    bus_id: str = ""
    parts: tuple[MigPlace, ...] = ()
    incident_s: float = LONG_AGO
    words: Mapping[Witness, Word] = {}
    without: Course | None = None
    reset: DueReset | None = None
    contained_s: float = LONG_AGO
    contained: int = 0
    remap: bool = False

    @property
    def units(self) -> frozenset[str]:
        """UUIDs of its MIG devices."""
        return frozenset(part.uuid for part in self.parts)

    @property
    def reset_soon(self) -> bool:
        """Whether it is offered to nobody once its holder has gone, until its remap is done."""
        return self.remap and self.contained >= CONTAINED_MAX


class HealthChange(Struct, frozen=True):
    """A GPU or MIG device changed its state. place: `0`, or `0:1` of a MIG device; empty where it was never known."""

    uuid: GpuUuid
    before: HealthState
    now: Health
    place: str = ""


def after_signal(record: GpuRecord, signal: Signal, why: str, now: Moment) -> GpuRecord:
    """The record after what was seen. Being healthy ends all that was due or may be taken back."""
    course = _moved(Course(record.health, record.trouble_s), signal, why, now)
    record = replace(record, health=course.health, trouble_s=course.trouble_s)
    if course.health.state is HealthState.HEALTHY:
        return replace(record, words={}, without=None, reset=None)
    return replace(record, without=_moved(record.without, signal, why, now)) if record.without else record


def after_word(record: GpuRecord, source: Witness, word: Word, now: Moment) -> GpuRecord:
    """The record after trouble on the word of an event alone: the gravest of its source counts, and the latest."""
    without = record.without or Course(record.health, record.trouble_s)
    before = record.words.get(source)
    kept = replace(before, at_s=word.at_s) if before and before.signal is Signal.FATAL else word
    moved = _moved(Course(record.health, record.trouble_s), word.signal, word.why, now)
    words = {**record.words, source: kept}
    return replace(record, health=moved.health, trouble_s=moved.trouble_s, words=words, without=without)


def taken_back(record: GpuRecord, source: Witness, why: str, now: Moment) -> GpuRecord:
    """The record as if it had been without the word of that source."""
    if record.without is None or (word := record.words.get(source)) is None:
        return record
    words = {each: kept for each, kept in record.words.items() if each is not source}
    course = record.without
    for kept in words.values():
        course = _moved(course, kept.signal, kept.why, now)
    before, state = record.health, course.health.state
    if state is before.state:
        health = replace(before, why=course.health.why)
    else:
        why = f"{word.why}: {why}" if state is HealthState.HEALTHY else course.health.why
        health = Health(state, now.wall_s, why, before.changes + 1)
    return replace(
        record, health=health, trouble_s=course.trouble_s, words=words, without=record.without if words else None
    )


def confirmed(record: GpuRecord) -> GpuRecord:
    """The record where nothing takes the catalogue's word back any more."""
    if record.without is None or (word := record.words.get(Witness.CATALOGUE)) is None:
        return record
    words = {each: kept for each, kept in record.words.items() if each is not Witness.CATALOGUE}
    course = _moved(record.without, word.signal, word.why, Moment(word.at_s, record.health.since))
    return replace(record, words=words, without=course if words else None)


def reset_text(record: GpuRecord) -> str:
    """Why a reset is due, a clause; empty where none is."""
    return f"a reset is due since {xid_name(record.reset.xid)}" if record.reset else ""


def _moved(course: Course, signal: Signal, why: str, now: Moment) -> Course:
    health, state = course.health, next_state(course.health.state, signal)
    # An odd sign is trouble as long as it shows, but not for a GPU that waits to be granted again.
    troubled = signal in TROUBLE or state is HealthState.SUSPECT is not health.state
    troubled = troubled or (signal in ODDITIES and health.state is HealthState.SUSPECT)
    trouble_s = now.clock_s if troubled else course.trouble_s
    if state is health.state:
        return Course(health, trouble_s)
    kept = health.why if state in (HealthState.RECOVERING, HealthState.HEALTHY) else why
    return Course(Health(state, now.wall_s, kept, health.changes + 1), trouble_s)
