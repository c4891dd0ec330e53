"""The states of a GPU's health and what leads from one to another, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from nri_gpu.domain.health import EventType, GpuEvent, HealthState, Sign


class Signal(StrEnum):
    """What happened, once it was classed. "Quiet" is counted from the last trouble."""

    FATAL = "fatal"  # an event, or a look that found it broken
    INCIDENT = "incident"  # an event of the doubtful kind
    ODD = "odd"  # a look found something odd
    CALM = "calm"  # a look found nothing, and it was quiet since the last probe
    RESTED = "rested"  # a look found nothing, and it was quiet for the whole hold-down
    ODD_RESTED = "odd-rested"  # quiet for the hold-down, but for what is odd


# A signal that is missing changes nothing.
TRANSITIONS: Final[Mapping[HealthState, Mapping[Signal, HealthState]]] = {
    HealthState.HEALTHY: {
        Signal.FATAL: HealthState.BAD,
        Signal.INCIDENT: HealthState.SUSPECT,
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
        # What is odd may stay until the next reset; that must not keep it from working for ever.
        Signal.ODD_RESTED: HealthState.SUSPECT,
    },
}
TROUBLE: Final = frozenset({Signal.FATAL, Signal.INCIDENT})


def after(state: HealthState, signal: Signal) -> HealthState:
    """The next state, mostly the same."""
    return TRANSITIONS[state].get(signal, state)


class Meaning(StrEnum):
    """What an XID, or a kind of event, is taken for."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    BAD = "bad"


class Rules(Struct, frozen=True, kw_only=True):
    """What policy says. Times in seconds; reprobe_s: how long a bad GPU must be quiet to count as recovering."""

    ignored_xids: frozenset[int]
    fatal_xids: frozenset[int]
    other_xids: Meaning
    fatal_signs: frozenset[Sign]
    suspect_signs: frozenset[Sign]
    hold_down_s: float
    reprobe_s: float


# Names as in NVIDIA's list of XIDs (docs.nvidia.com/deploy/xid-errors), for sentences only.
XID_NAMES: Final[Mapping[int, str]] = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "memory row remapped or page retired",
    64: "memory row or page could not be retired",
    68: "video processor exception",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU could not be initialized",
    154: "GPU recovery action changed",
}

# What the newer bits mean is taken from their names in nvml.h; none was seen on hardware yet.
_KINDS: Final[Mapping[int, tuple[Meaning, str]]] = {
    EventType.DOUBLE_BIT_ECC: (Meaning.BAD, "double-bit ECC error"),
    EventType.ECC_STORM: (Meaning.SUSPECT, "a storm of single-bit ECC errors"),
    EventType.DRAM_RETIRED: (Meaning.SUSPECT, "memory was retired"),
    EventType.DRAM_RETIREMENT_FAILED: (Meaning.BAD, "memory could not be retired"),
    EventType.POISON: (Meaning.SUSPECT, "non-fatal poison error"),
    EventType.FATAL_POISON: (Meaning.BAD, "fatal poison error"),
    EventType.UNAVAILABLE: (Meaning.BAD, "the driver calls the GPU unavailable"),
}
_SIGNALS: Final = {Meaning.SUSPECT: Signal.INCIDENT, Meaning.BAD: Signal.FATAL}
SIGN_WORDS: Final[Mapping[Sign, str]] = {
    Sign.LOST: "GPU is lost",
    Sign.RESET_REQUIRED: "GPU requires a reset",
    Sign.UNREADABLE: "NVML cannot describe it",
    Sign.REMAP_FAILED: "a row of its memory could not be remapped",
    Sign.REMAP_PENDING: "a row of its memory is remapped at its next reset",
    Sign.FABRIC_NOT_READY: "its NVLink fabric is not ready",
    Sign.THERMAL: "slowed down by heat",
    Sign.POWER_BRAKE: "slowed down by the power brake",
}
# Those that a failed call shows, so that NVML says why.
_FAILURES: Final = frozenset({Sign.LOST, Sign.RESET_REQUIRED, Sign.UNREADABLE})
GONE: Final = "GPU is lost: NVML does not list it any more"


def heard(event: GpuEvent, rules: Rules) -> tuple[Signal | None, str]:
    """The class of an event, None where it means nothing, and what to call it."""
    if event.kind == EventType.XID:
        meaning, words = _xid_meaning(event.xid, rules), xid_words(event.xid)
    else:
        meaning, words = _KINDS.get(event.kind, (Meaning.IGNORE, f"event {event.kind:#x}"))
    return _SIGNALS.get(meaning), words


def of_its_part(event: GpuEvent, rules: Rules) -> bool:
    """Whether an event that names a MIG device is that device's alone. What is fatal is the whole GPU's."""
    return event.kind == EventType.XID and event.gpu_instance is not None and event.xid not in rules.fatal_xids


def looked(signs: tuple[Sign, ...], rules: Rules, said: str = "") -> tuple[Signal | None, str]:
    """The class of what a look showed; None: nothing. Signs of neither list are for people only.

    said: NVML's own words for a call that failed; empty where none did.
    """
    for listed, signal in ((rules.fatal_signs, Signal.FATAL), (rules.suspect_signs, Signal.ODD)):
        if found := [sign for sign in signs if sign in listed]:
            words = [said if said and sign in _FAILURES else SIGN_WORDS[sign] for sign in found]
            return signal, ", ".join(words)
    return None, ""


def unsure(signs: tuple[Sign, ...], rules: Rules) -> bool:
    """Whether all that makes it bad is that it could not be read: it may be busy, and is asked again."""
    return rules.fatal_signs.intersection(signs) == {Sign.UNREADABLE}


def xid_words(xid: int) -> str:
    """`XID 79, GPU has fallen off the bus`."""
    return ", ".join(filter(None, (f"XID {xid}", XID_NAMES.get(xid, ""))))


def _xid_meaning(xid: int, rules: Rules) -> Meaning:
    if xid in rules.ignored_xids:
        return Meaning.IGNORE
    return Meaning.BAD if xid in rules.fatal_xids else rules.other_xids
