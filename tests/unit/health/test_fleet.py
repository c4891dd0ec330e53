"""The health of a node's GPUs over time, which is a parameter."""

from __future__ import annotations

import json

import pytest

from nri_gpu.domain.codec import canonical, decode
from nri_gpu.domain.gpu import GpuFault, Inventory
from nri_gpu.domain.health import EventType, GpuEvent, Sign, State
from nri_gpu.health.classes import heard
from nri_gpu.health.fleet import Fleet
from nri_gpu.health.table import Signal
from tests.support.health import RULES, UUIDS, at, look, xid

WELL = look((), ())


def state(fleet: Fleet, gpu: int = 0) -> State:
    return fleet.records[UUIDS[gpu]].health.state


def looked(fleet: Fleet, seconds: float, inventory: Inventory = WELL) -> Fleet:
    return fleet.looked(inventory, RULES, at(seconds))[0]


@pytest.mark.parametrize(
    ("event", "signal"),
    [
        (xid(79), Signal.FATAL),
        (xid(63), Signal.INCIDENT),
        (xid(31), None),
        (GpuEvent(UUIDS[0], int(EventType.DOUBLE_BIT_ECC)), Signal.FATAL),
        (GpuEvent(UUIDS[0], int(EventType.UNAVAILABLE)), Signal.FATAL),
        (GpuEvent(UUIDS[0], int(EventType.POISON)), Signal.INCIDENT),
        (GpuEvent(UUIDS[0], int(EventType.MIG_CHANGED)), None),
        (GpuEvent(UUIDS[0], int(EventType.RECOVERY_ACTION)), None),
        (GpuEvent(UUIDS[0], 0x10000), None),
    ],
)
def test_classes_of_events(event: GpuEvent, signal: Signal | None) -> None:
    assert heard(event, RULES)[0] is signal


def test_one_bad_gpu_of_two_and_its_way_back() -> None:
    fleet = looked(Fleet(), 0)
    fleet, changes = fleet.heard(xid(79), RULES, at(5))
    assert [(change.uuid, change.before, change.now.state) for change in changes] == [
        (UUIDS[0], State.HEALTHY, State.BAD)
    ]
    dressed = fleet.dressed(WELL, RULES).gpus
    assert dressed[0].unavailable == "bad since 2023-11-14 22:13:25 UTC: XID 79, GPU has fallen off the bus"
    assert dressed[1] == WELL.gpus[1]
    assert state(looked(fleet, 6)) is State.BAD, "a look just after says nothing yet"
    fleet = looked(fleet, 20)
    assert state(fleet) is State.RECOVERING
    assert "granted after 100 s without a fault: XID 79" in fleet.dressed(WELL, RULES).gpus[0].unavailable
    assert state(looked(fleet, 104)) is State.RECOVERING
    fleet = looked(fleet, 105)
    assert state(fleet) is State.HEALTHY
    gpu = fleet.dressed(WELL, RULES).gpus[0]
    assert (gpu.unavailable, gpu.health.changes, gpu.health.why) == ("", 3, "XID 79, GPU has fallen off the bus")
    assert state(fleet, 1) is State.HEALTHY


def test_application_errors_leave_no_trace() -> None:
    fleet = looked(Fleet(), 0)
    assert fleet.heard(xid(31), RULES, at(1)) == (fleet, ())


def test_incidents_that_come_together_are_one() -> None:
    fleet = looked(Fleet(), 0).heard(xid(94), RULES, at(1))[0].heard(xid(63), RULES, at(2))[0]
    assert state(fleet) is State.SUSPECT
    assert fleet.dressed(WELL, RULES).gpus[0].unavailable == ""
    assert state(fleet.heard(xid(94), RULES, at(12))[0]) is State.BAD


def test_trouble_while_recovering_begins_the_hold_down_anew() -> None:
    fleet = looked(looked(Fleet(), 0).heard(xid(79), RULES, at(0))[0], 50)
    fleet = fleet.heard(xid(63), RULES, at(60))[0]
    assert state(fleet) is State.BAD
    assert state(looked(looked(fleet, 80), 159)) is State.RECOVERING
    assert state(looked(looked(fleet, 80), 160)) is State.HEALTHY


def test_a_lost_gpu_is_bad_as_long_as_it_is_lost() -> None:
    lost = look((Sign.LOST,), ())
    fleet = looked(looked(looked(Fleet(), 0), 10, lost), 500, lost)
    assert state(fleet) is State.BAD
    assert state(looked(fleet, 599)) is State.RECOVERING
    assert state(looked(looked(fleet, 599), 600)) is State.HEALTHY


def test_a_gpu_that_cannot_be_described_any_more_is_missed() -> None:
    fleet, changes = looked(Fleet(), 0).looked(look((), faults=(GpuFault(1, "GPU is lost"),)), RULES, at(10))
    assert [change.uuid for change in changes] == [UUIDS[1]]
    # It is renumbered away, and still missed when nothing tells of it any more.
    fleet = looked(fleet, 200, look(()))
    assert state(fleet, 1) is State.BAD
    assert state(looked(fleet, 210), 1) is State.RECOVERING


def test_a_gpu_that_was_taken_out_while_it_was_well_is_forgotten() -> None:
    assert UUIDS[1] not in looked(looked(Fleet(), 0), 10, look(())).records


def test_a_look_that_failed_says_nothing() -> None:
    fleet = looked(Fleet(), 0)
    assert fleet.looked(Inventory(taken_at=1, fault="no driver"), RULES, at(1)) == (fleet, ())


def test_what_is_odd_makes_suspect_for_as_long_as_it_shows() -> None:
    odd = look((Sign.REMAP_PENDING,), ())
    fleet = looked(looked(Fleet(), 0, odd), 500, odd)
    assert state(fleet) is State.SUSPECT
    assert state(looked(fleet, 599)) is State.SUSPECT
    assert state(looked(fleet, 600)) is State.HEALTHY


def test_what_is_odd_keeps_no_gpu_from_working_for_ever() -> None:
    odd = look((Sign.REMAP_PENDING,), ())
    fleet = looked(Fleet(), 0).heard(xid(48), RULES, at(0))[0]
    fleet = looked(looked(fleet, 100, odd), 130, odd)
    assert state(fleet) is State.SUSPECT


@pytest.mark.parametrize("sign", [Sign.THERMAL, Sign.POWER_BRAKE])
def test_signs_of_neither_list_are_only_shown(sign: Sign) -> None:
    assert state(looked(Fleet(), 0, look((sign,)))) is State.HEALTHY


def test_it_outlives_a_restart() -> None:
    fleet = looked(Fleet(), 0).heard(xid(79, gpu=1), RULES, at(5))[0]
    assert decode(Fleet, json.loads(canonical(fleet))) == fleet


def test_an_incident_of_a_bad_gpu_begins_the_hold_down_anew() -> None:
    fleet = looked(Fleet(), 0).heard(xid(79), RULES, at(0))[0].heard(xid(63), RULES, at(5))[0]
    assert state(looked(looked(fleet, 50), 104)) is State.RECOVERING
    assert state(looked(looked(fleet, 50), 105)) is State.HEALTHY
