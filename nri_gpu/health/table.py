"""The states of a GPU's health and what leads from one to another, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from nri_gpu.domain.health import State


class Signal(StrEnum):
    """What happened, once it was classed. "Quiet" is counted from the last trouble."""

    FATAL = "fatal"  # an event, or a look that found it broken
    INCIDENT = "incident"  # an event of the doubtful kind
    ODD = "odd"  # a look found something odd
    CALM = "calm"  # a look found nothing, and it was quiet since the last probe
    RESTED = "rested"  # a look found nothing, and it was quiet for the whole hold-down
    ODD_RESTED = "odd-rested"  # quiet for the hold-down, but for what is odd


# A signal that is missing changes nothing.
TRANSITIONS: Final[Mapping[State, Mapping[Signal, State]]] = {
    State.HEALTHY: {
        Signal.FATAL: State.BAD,
        Signal.INCIDENT: State.SUSPECT,
        Signal.ODD: State.SUSPECT,
        Signal.ODD_RESTED: State.SUSPECT,
    },
    State.SUSPECT: {
        Signal.FATAL: State.BAD,
        Signal.INCIDENT: State.BAD,
        Signal.RESTED: State.HEALTHY,
    },
    State.BAD: {
        Signal.CALM: State.RECOVERING,
        Signal.RESTED: State.RECOVERING,
        Signal.ODD_RESTED: State.RECOVERING,
    },
    State.RECOVERING: {
        Signal.FATAL: State.BAD,
        Signal.INCIDENT: State.BAD,
        Signal.RESTED: State.HEALTHY,
        # What is odd may stay until the next reset; that must not keep it from working for ever.
        Signal.ODD_RESTED: State.SUSPECT,
    },
}
TROUBLE: Final = frozenset({Signal.FATAL, Signal.INCIDENT})


def after(state: State, signal: Signal) -> State:
    """The next state, mostly the same."""
    return TRANSITIONS[state].get(signal, state)
