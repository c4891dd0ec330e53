"""What holds of the whole table of health states."""

from __future__ import annotations

import itertools

from nri_gpu.domain.health import Health, HealthState
from nri_gpu.health.states import TRANSITIONS, Signal, next_state


def test_every_state_has_a_row_and_a_way_back() -> None:
    assert set(TRANSITIONS) == set(HealthState)
    for start in HealthState:
        reached = {start}
        for _ in HealthState:
            reached |= {next_state(state, signal) for state, signal in itertools.product(reached, Signal)}
        assert HealthState.HEALTHY in reached


def test_trouble_makes_it_worse_and_only_rest_makes_it_grantable_again() -> None:
    for state in HealthState:
        assert next_state(state, Signal.FATAL) is HealthState.BAD
        assert next_state(state, Signal.INCIDENT) in (HealthState.BAD, HealthState.SUSPECT)
        for signal in Signal:
            then = next_state(state, signal)
            if then is HealthState.BAD is not state:
                assert signal in (Signal.FATAL, Signal.INCIDENT)
            if Health(then).grantable and not Health(state).grantable:
                assert signal in (Signal.RESTED, Signal.ODD_RESTED)


def test_rest_and_calm_never_make_it_worse() -> None:
    for state, signal in itertools.product(HealthState, (Signal.CALM, Signal.RESTED)):
        assert Health(next_state(state, signal)).severity <= Health(state).severity
