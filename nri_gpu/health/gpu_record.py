"""The record of one GPU, and how a signal changes it."""

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
    """The present, on two clocks. clock_s: a clock that never jumps, for durations.

    wall_s: since the epoch, for people.
    """

    clock_s: float
    wall_s: float


class MigPlace(Struct, frozen=True):
    """A MIG device of a GPU. index: in NVML's list. gpu_instance, compute_instance: events identify it by these."""

    uuid: GpuUuid
    index: int
    gpu_instance: int
    compute_instance: int


class Witness(StrEnum):
    """The evidence by which an event counts as trouble."""

    CATALOGUE = "catalogue"  # taken back by a recovery action of the driver
    DOUBLE_BIT = "double-bit"  # taken back by a contained ECC error


class Word(Struct, frozen=True):
    """A verdict from an event that later evidence may revoke. at_s: of the last such event, on the clock."""

    signal: Signal
    why: str
    at_s: float


class Course(Struct, frozen=True, omit_defaults=True):
    """A state of health, and when there last was trouble, on the clock. Changes are counted by `NodeHealth` alone."""

    health: Health = WELL
    trouble_s: float = LONG_AGO


class DueReset(Struct, frozen=True, omit_defaults=True):
    """A reset that an XID asks for."""

    xid: int
    at_s: float  # of the XID, on the clock
    module: str = ""  # which load of the driver's kernel module the XID happened to
    pending: bool = False  # a check has shown a pending remap since


class GpuRecord(Struct, frozen=True, omit_defaults=True):
    """The memory of one GPU, or of a MIG device with an event of its own.

    An earlier version reads the first six fields alone.
    """

    health: Health = WELL
    trouble_s: float = LONG_AGO  # when there last was trouble, on the clock
    doubt_s: float | None = None  # since when it cannot be read, on the clock, or None if it can
    place: str = ""  # its index when it could last be described
    bus_id: str = ""  # its address then
    parts: tuple[MigPlace, ...] = ()  # its MIG devices then
    incident_s: float = LONG_AGO  # of the last incident, on the clock
    words: Mapping[Witness, Word] = {}  # what may be taken back
    without: Course | None = None  # its course without `words`
    reset: DueReset | None = None  # None if no reset is due
    contained_s: float = LONG_AGO  # of the last contained ECC error, on the clock
    contained: int = 0  # contained ECC errors since a remap is pending
    remap: bool = False  # a remap is pending on a driver without recovery actions

    @property
    def units(self) -> frozenset[str]:
        """Return the UUIDs of its MIG devices."""
        return frozenset(part.uuid for part in self.parts)

    @property
    def reset_soon(self) -> bool:
        """Return whether it is not granted again once its holder has ended, until its remap is done."""
        return self.remap and self.contained >= CONTAINED_MAX


class HealthChange(Struct, frozen=True):
    """A change of state of a GPU or MIG device.

    place: `0`, or `0:1` of a MIG device, or empty if it was never known.
    """

    uuid: GpuUuid
    before: HealthState
    now: Health
    place: str = ""


def after_signal(record: GpuRecord, signal: Signal, why: str, now: Moment) -> GpuRecord:
    """Return the record after what was seen. Being healthy ends all that was due or may be taken back."""
    course = _moved(Course(record.health, record.trouble_s), signal, why, now)
    record = replace(record, health=course.health, trouble_s=course.trouble_s)
    if course.health.state is HealthState.HEALTHY:
        return replace(record, words={}, without=None, reset=None)
    return replace(record, without=_moved(record.without, signal, why, now)) if record.without else record


def after_word(record: GpuRecord, source: Witness, word: Word, now: Moment) -> GpuRecord:
    """Return the record after trouble on the word of an event alone.

    Of a source's words the gravest counts, with the time of the latest.
    """
    without = record.without or Course(record.health, record.trouble_s)
    before = record.words.get(source)
    kept = replace(before, at_s=word.at_s) if before and before.signal is Signal.FATAL else word
    moved = _moved(Course(record.health, record.trouble_s), word.signal, word.why, now)
    words = {**record.words, source: kept}
    return replace(record, health=moved.health, trouble_s=moved.trouble_s, words=words, without=without)


def taken_back(record: GpuRecord, source: Witness, why: str, now: Moment) -> GpuRecord:
    """Return the record as if it had been without the word of that source."""
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
        health = replace(before, state=state, since=now.wall_s, why=why)
    return replace(
        record, health=health, trouble_s=course.trouble_s, words=words, without=record.without if words else None
    )


def confirmed(record: GpuRecord) -> GpuRecord:
    """Return the record as it is once nothing takes the catalogue's word back any more."""
    if record.without is None or (word := record.words.get(Witness.CATALOGUE)) is None:
        return record
    words = {each: kept for each, kept in record.words.items() if each is not Witness.CATALOGUE}
    course = _moved(record.without, word.signal, word.why, Moment(word.at_s, record.health.since))
    return replace(record, words=words, without=course if words else None)


def reset_text(record: GpuRecord) -> str:
    """Return why a reset is due, a clause, or empty."""
    return f"a reset is due since {xid_name(record.reset.xid)}" if record.reset else ""


def _moved(course: Course, signal: Signal, why: str, now: Moment) -> Course:
    health, state = course.health, next_state(course.health.state, signal)
    # A suspect sign counts as trouble while it shows, except on a recovering GPU.
    troubled = signal in TROUBLE or state is HealthState.SUSPECT is not health.state
    troubled = troubled or (signal in ODDITIES and health.state is HealthState.SUSPECT)
    trouble_s = now.clock_s if troubled else course.trouble_s
    if state is health.state:
        return Course(health, trouble_s)
    kept = health.why if state in (HealthState.RECOVERING, HealthState.HEALTHY) else why
    return Course(replace(health, state=state, since=now.wall_s, why=kept), trouble_s)
