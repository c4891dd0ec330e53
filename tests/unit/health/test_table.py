"""The table of states: each row a case, and what holds of all of it."""

from __future__ import annotations

import itertools

import pytest

from nri_gpu.domain.health import Health, HealthState
from nri_gpu.health.states import TRANSITIONS, Signal, next_state

H, S, B, R = HealthState.HEALTHY, HealthState.SUSPECT, HealthState.BAD, HealthState.RECOVERING


@pytest.mark.parametrize(
    ("state", "signal", "expected"),
    [
        (H, Signal.FATAL, B),
        (H, Signal.INCIDENT, S),
        (H, Signal.ODD, S),
        (H, Signal.ODD_RESTED, S),
        (H, Signal.RESTED, H),
        (S, Signal.FATAL, B),
        (S, Signal.INCIDENT, B),
        (S, Signal.ODD, S),
        (S, Signal.ODD_RESTED, S),
        (S, Signal.CALM, S),
        (S, Signal.RESTED, H),
        (B, Signal.FATAL, B),
        (B, Signal.INCIDENT, B),
        (B, Signal.ODD, B),
        (B, Signal.CALM, R),
        (B, Signal.RESTED, R),
        (B, Signal.ODD_RESTED, R),
        (R, Signal.FATAL, B),
        (R, Signal.INCIDENT, B),
        (R, Signal.ODD, R),
        (R, Signal.CALM, R),
        (R, Signal.RESTED, H),
        (R, Signal.ODD_RESTED, S),
    ],
)
def test_rows(state: HealthState, signal: Signal, expected: HealthState) -> None:
    assert next_state(state, signal) is expected


def test_every_state_has_a_row_and_a_way_back() -> None:
    assert set(TRANSITIONS) == set(HealthState)
    for start in HealthState:
        reached = {start}
        for _ in HealthState:
            reached |= {next_state(state, signal) for state, signal in itertools.product(reached, Signal)}
        assert HealthState.HEALTHY in reached


def test_only_trouble_makes_bad_and_only_rest_makes_grantable_again() -> None:
    for state, row in TRANSITIONS.items():
        for signal, then in row.items():
            if then is HealthState.BAD:
                assert signal in (Signal.FATAL, Signal.INCIDENT)
            if Health(then).grantable and not Health(state).grantable:
                assert signal in (Signal.RESTED, Signal.ODD_RESTED)
