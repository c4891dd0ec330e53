"""The states of a GPU's health, what leads from one to another, and what events and signs mean."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from nri_gpu.domain.health import EventType, GpuEvent, HealthState, Sign
from nri_gpu.policy.health import HealthSettings, OtherXids


class Signal(StrEnum):
    """The class of what was seen. "Quiet" is counted from the last trouble."""

    FATAL = "fatal"  # an event, or a refresh that found it broken
    INCIDENT = "incident"  # an event that may not be the GPU's fault
    ODD = "odd"  # a refresh found something odd
    CALM = "calm"  # a refresh found nothing, and it was quiet since the last probe
    RESTED = "rested"  # a refresh found nothing, and it was quiet for the whole hold-down
    ODD_RESTED = "odd-rested"  # quiet for the hold-down, and something odd still shows


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
        # An odd sign may stay until the next reset; that must not withhold the GPU for ever.
        Signal.ODD_RESTED: HealthState.SUSPECT,
    },
}
TROUBLE: Final = frozenset({Signal.FATAL, Signal.INCIDENT})


def next_state(state: HealthState, signal: Signal) -> HealthState:
    return TRANSITIONS[state].get(signal, state)


# As in NVIDIA's list of XIDs (docs.nvidia.com/deploy/xid-errors), for messages only.
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
_OTHER_XIDS: Final = {OtherXids.SUSPECT: Signal.INCIDENT, OtherXids.BAD: Signal.FATAL}
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


def signal_of_event(event: GpuEvent, rules: HealthSettings) -> tuple[Signal | None, str]:
    """The class of an event, None where it means nothing, and its name."""
    if event.kind != EventType.XID:
        return _KINDS.get(event.kind, (None, f"event {event.kind:#x}"))
    name = xid_name(event.xid)
    if event.xid in rules.ignored_xids:
        return None, name
    return Signal.FATAL if event.xid in rules.fatal_xids else _OTHER_XIDS.get(rules.other_xids), name


def is_of_mig_device(event: GpuEvent, rules: HealthSettings) -> bool:
    """Whether an event concerns only the MIG device that it names. A fatal one concerns the whole GPU."""
    return event.kind == EventType.XID and event.gpu_instance is not None and event.xid not in rules.fatal_xids


def signal_of_signs(signs: tuple[Sign, ...], rules: HealthSettings, message: str = "") -> tuple[Signal | None, str]:
    """The class of a refresh's signs, None for those that the policy does not list, and why.

    message: NVML's, of a call that failed; empty where none did.
    """
    for listed, signal in ((rules.fatal_signs, Signal.FATAL), (rules.suspect_signs, Signal.ODD)):
        if found := [sign for sign in signs if sign in listed]:
            texts = [message if message and sign in _FAILURES else SIGN_TEXTS[sign] for sign in found]
            return signal, ", ".join(texts)
    return None, ""


def unreadable_only(signs: tuple[Sign, ...], rules: HealthSettings) -> bool:
    """Whether the only fatal sign is that the GPU could not be read."""
    return rules.fatal_signs.intersection(signs) == {Sign.UNREADABLE}


def xid_name(xid: int) -> str:
    """`XID 79, GPU has fallen off the bus`."""
    return ", ".join(filter(None, (f"XID {xid}", XID_NAMES.get(xid, ""))))
