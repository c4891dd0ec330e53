"""A block for each GPU in trouble: its state, since when, why, and what to do; each fact once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import Times
from nri_gpu.daemon.answers import CordonStatus, HealthStatus, UnitStatus
from nri_gpu.decision.refusals import CORDONED, IN_MIG_MODE
from nri_gpu.domain.health import HealthState, Sign
from nri_gpu.health.health_notes import failing, reset_steps
from nri_gpu.health.states import SIGN_TEXTS

GRANTABLE: Final = (HealthState.HEALTHY, HealthState.SUSPECT)
# What to do about each state, and each sign, of which the driver or the catalogue of XIDs says nothing.
STATES: Final = {
    HealthState.SUSPECT: "it is granted all the same",
    HealthState.BAD: "see `dmesg | grep NVRM`; it is granted again after health.hold_down_s without trouble",
    HealthState.RECOVERING: "it is granted again after health.hold_down_s without trouble",
}
SIGNS: Final = {
    Sign.THERMAL: "its clocks are held down because it is hot: check its cooling",
    Sign.POWER_BRAKE: "its clocks are held down by the power supply: check that",
    Sign.REMAP_FAILED: "a row of its memory cannot be replaced: have the GPU replaced",
    Sign.FABRIC_NOT_READY: "its NVLink fabric is not up: see `systemctl status nvidia-fabricmanager`",
}
RESET_SIGNS: Final = (Sign.RESET_REQUIRED, Sign.REMAP_PENDING)


def trouble_lines(gpu: UnitStatus, whole: UnitStatus | None, times: Times) -> Iterator[Line]:
    """Yield the block of a GPU or MIG device, or nothing if all is well. whole: the GPU of a MIG device."""
    why = "" if gpu.withheld == IN_MIG_MODE or gpu.health.state not in GRANTABLE else times.aged(gpu.withheld)
    if whole and (gpu.health, gpu.withheld) == (whole.health, whole.withheld):
        return  # its GPU's block says it
    name = name_of(gpu)
    signs = [each for each in gpu.health.signs if whole is None and not _is_said(each, gpu.health)]
    state = [_state(gpu.health, times)] if gpu.health.state != HealthState.HEALTHY or gpu.health.changes else []
    if gpu.cordoned:
        state.append(_cordoned(gpu.cordoned, times))
    if why and why != CORDONED:
        state.append(f"cannot be granted{times.lasting(gpu.unavailable_since_s)}: {why}")
    if signs:
        state.append(f"shows {', '.join(signs)}")
    steps = [*_steps(gpu, why, times)]
    ill = why or gpu.health.state not in GRANTABLE
    if state:
        yield Line(f"{name} {'; '.join(state)}", Tone.BAD if ill else Tone.WARN)
    elif steps:
        yield Line(f"{name}: {steps.pop(0)}", Tone.WARN)
    yield from (Line(f"  {step}") for step in steps)


def name_of(gpu: UnitStatus) -> str:
    return f"{'MIG device' if gpu.kind == 'mig' else 'GPU'} {gpu.place}"


def _is_said(sign: str, health: HealthStatus) -> bool:
    """Return whether the state is about that sign."""
    return health.state != HealthState.HEALTHY and sign in SIGN_TEXTS and SIGN_TEXTS[Sign(sign)] in health.why


def _state(health: HealthStatus, times: Times) -> str:
    often = f", its state changed {health.changes} times" if health.changes > 1 else ""
    if health.state == HealthState.HEALTHY:
        return f"is healthy{times.lasting(health.since_s)}{often}; it recovered from {health.why}"
    return f"is {health.state}{times.lasting(health.since_s)}{often}: {health.why}"


def _cordoned(cordon: CordonStatus, times: Times) -> str:
    """Return who took a GPU out of use, how long ago, and why."""
    end = " until a reset of it is proven" if cordon.until_reset else ""
    return f"is out of use{times.lasting(cordon.at_s)}{end}, by {cordon.by}: {cordon.why}"


def _steps(gpu: UnitStatus, why: str, times: Times) -> Iterator[str]:
    """Yield what is known beside the state, and what to do."""
    notes, signs, state = gpu.notes, gpu.health.signs if gpu.kind != "mig" else (), gpu.health.state
    resets = notes.reset or any(sign in signs for sign in RESET_SIGNS)
    if notes.reset:
        yield _not_again(notes.reset, gpu.health.why)
    if resets:
        yield from reset_steps(gpu.uuid)[: 2 if notes.reset else 1]
    if notes.soon and notes.soon != why:
        yield f"it is not granted again once its holder has ended: {notes.soon}"
    if notes.namespaces:
        yield f"{failing(notes)}; nri-gpu doctor says how to withhold it"
    if notes.xid and notes.xid not in f"{gpu.health.why}{notes.reset}":
        yield f"last XID, {times.ago(notes.xid_at_s or 0)}: {notes.xid}"
    if state in STATES and not (notes.reset and state == HealthState.BAD):
        yield STATES[HealthState(state)]
    if gpu.cordoned:
        yield f"nri-gpu uncordon {gpu.place}    # back into use"
    yield from (SIGNS[Sign(sign)] for sign in signs if sign in SIGNS)


def _not_again(reset: str, why: str) -> str:
    """Return why it stays withheld, without the XID that its state is about already."""
    return f"{reset.removesuffix(f' since {why}')}: it is withheld until then"
