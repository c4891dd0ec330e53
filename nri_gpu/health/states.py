"""The states of a GPU's health, the signals that lead from one to another, and the meaning of events and signs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from nri_gpu.domain.health import EventType, GpuEvent, HealthState, Sign
from nri_gpu.health.xids import APPLICATIONS, ActionClass, class_of, xid_name
from nri_gpu.policy.health_settings import HealthSettings, OtherXids


class Signal(StrEnum):
    """The class of what was seen. "Quiet" is counted from the last trouble."""

    FATAL = "fatal"  # an event, or a refresh that found it broken
    INCIDENT = "incident"  # an event that may not be the GPU's fault, and was not the first of late
    UNCLEAR = "unclear"  # an event that says nothing by itself, however often it comes; or the first incident of late
    ODD = "odd"  # a refresh found something odd
    CALM = "calm"  # a refresh found nothing, and it was quiet since the last probe
    RESTED = "rested"  # a refresh found nothing, and it was quiet for the whole hold-down
    ODD_RESTED = "odd-rested"  # quiet for the hold-down, and something odd still shows


# A signal that is missing changes nothing.
TRANSITIONS: Final[Mapping[HealthState, Mapping[Signal, HealthState]]] = {
    HealthState.HEALTHY: {
        Signal.FATAL: HealthState.BAD,
        Signal.INCIDENT: HealthState.SUSPECT,
        Signal.UNCLEAR: HealthState.SUSPECT,
        Signal.ODD: HealthState.SUSPECT,
        Signal.ODD_RESTED: HealthState.SUSPECT,
    },
    HealthState.SUSPECT: {
        Signal.FATAL: HealthState.BAD,
        Signal.INCIDENT: HealthState.BAD,
        Signal.RESTED: HealthState.HEALTHY,
    },
    HealthState.BAD: {
        Signal.CALM: HealthState.RECOVERING,
        Signal.RESTED: HealthState.RECOVERING,
        Signal.ODD_RESTED: HealthState.RECOVERING,
    },
    HealthState.RECOVERING: {
        Signal.FATAL: HealthState.BAD,
        Signal.INCIDENT: HealthState.BAD,
        Signal.RESTED: HealthState.HEALTHY,
        # An odd sign may stay until the next reset; that must not withhold the GPU for ever.
        Signal.ODD_RESTED: HealthState.SUSPECT,
    },
}
TROUBLE: Final = frozenset({Signal.FATAL, Signal.INCIDENT})
ODDITIES: Final = frozenset({Signal.UNCLEAR, Signal.ODD, Signal.ODD_RESTED})  # trouble for a GPU that is granted


def next_state(state: HealthState, signal: Signal) -> HealthState:
    return TRANSITIONS[state].get(signal, state)


# The meaning of the newer bits is taken from their names in nvml.h; none was seen on hardware yet.
_KINDS: Final[Mapping[int, tuple[Signal, str]]] = {
    EventType.DOUBLE_BIT_ECC: (Signal.FATAL, "double-bit ECC error"),
    EventType.ECC_STORM: (Signal.INCIDENT, "a storm of single-bit ECC errors"),
    EventType.DRAM_RETIRED: (Signal.INCIDENT, "memory was retired"),
    EventType.DRAM_RETIREMENT_FAILED: (Signal.FATAL, "memory could not be retired"),
    EventType.POISON: (Signal.INCIDENT, "non-fatal poison error"),
    EventType.FATAL_POISON: (Signal.FATAL, "fatal poison error"),
    EventType.UNAVAILABLE: (Signal.FATAL, "the driver calls the GPU unavailable"),
}
SIGN_TEXTS: Final[Mapping[Sign, str]] = {
    Sign.LOST: "GPU is lost",
    Sign.RESET_REQUIRED: "GPU requires a reset",
    Sign.UNREADABLE: "NVML cannot describe it",
    Sign.REMAP_FAILED: "a row of its memory could not be remapped",
    Sign.REMAP_PENDING: "a row of its memory is remapped at its next reset",
    Sign.FABRIC_NOT_READY: "its NVLink fabric is not ready",
    Sign.THERMAL: "slowed down by heat",
    Sign.POWER_BRAKE: "slowed down by the power brake",
}
# Shown by a failed call, whose message says why.
_FAILURES: Final = frozenset({Sign.LOST, Sign.RESET_REQUIRED, Sign.UNREADABLE})
NOT_LISTED: Final = "GPU is lost: NVML does not list it any more"


class Meaning(Struct, frozen=True):
    """The meaning of an event."""

    signal: Signal | None  # None if it changes nothing
    why: str  # its name
    word: bool = False  # trouble on the catalogue's word, which the driver's recovery action may take back
    reset: bool = False  # a reset is due
    whole: bool = True  # it concerns the whole GPU, whatever MIG device it names


def meaning_of(event: GpuEvent, rules: HealthSettings) -> Meaning:
    if event.kind != EventType.XID:
        return Meaning(*_KINDS.get(event.kind, (None, f"event {event.kind:#x}")))
    name, found = xid_name(event.xid), class_of(event.xid)
    whole = event.gpu_instance is None
    if event.xid in rules.ignored:
        return Meaning(None, name)
    if event.xid in rules.fatal:
        return Meaning(Signal.FATAL, name)
    resets = found is ActionClass.RESET and event.xid not in APPLICATIONS
    match rules.other_xids:
        case OtherXids.IGNORE:
            return Meaning(None, name)
        case OtherXids.BAD:
            return Meaning(Signal.FATAL, name, reset=resets, whole=whole or resets)
    if resets:
        return Meaning(Signal.FATAL, name, word=True, reset=True)
    unclear = found in (ActionClass.UNCLEAR, ActionClass.UNKNOWN) and event.xid not in APPLICATIONS
    return Meaning(Signal.UNCLEAR if unclear else None, name, word=unclear, whole=whole)


def signal_of_signs(signs: tuple[Sign, ...], rules: HealthSettings, message: str = "") -> tuple[Signal | None, str]:
    """Return the class of a refresh's signs, or None for signs that the policy does not list, and why.

    message: NVML's, of a call that failed, or empty.
    """
    for listed, signal in ((rules.fatal_signs, Signal.FATAL), (rules.suspect_signs, Signal.ODD)):
        if found := [sign for sign in signs if sign in listed]:
            texts = [message if message and sign in _FAILURES else SIGN_TEXTS[sign] for sign in found]
            return signal, ", ".join(texts)
    return None, ""


def unreadable_only(signs: tuple[Sign, ...], rules: HealthSettings) -> bool:
    """Return whether the only fatal sign is that the GPU could not be read."""
    return rules.fatal_signs.intersection(signs) == {Sign.UNREADABLE}
