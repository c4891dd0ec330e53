"""The health of a node's GPUs over time, which is a parameter."""

from __future__ import annotations

import pytest
from msgspec import json
from msgspec.structs import replace

from nri_gpu.domain.gpu import Fabric, FabricState
from nri_gpu.domain.health import EventType, GpuEvent, HealthState, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.fabric import NOT_READY, waiting
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.health.states import Signal, meaning_of
from nri_gpu.policy.health_settings import HealthSettings, UnreadyFabric
from tests.support.health import PARTS, RULES, UUIDS, at, look, with_parts, xid

WELL = look((), ())
LOST_1 = GpuFault(1, "nvmlDeviceGetHandleByIndex: GPU is lost (15)", 15, Sign.LOST)
UNSEEN = NodeHealth()
HEALTHY, SUSPECT, BAD, RECOVERING = (HealthState[name] for name in ("HEALTHY", "SUSPECT", "BAD", "RECOVERING"))


def state(health: NodeHealth, gpu: int = 0) -> HealthState:
    return health.records[UUIDS[gpu]].health.state


def looked(health: NodeHealth, seconds: float, inventory: Inventory = WELL) -> NodeHealth:
    return looked_by(RULES, health, seconds, inventory)


def looked_by(rules: HealthSettings, health: NodeHealth, seconds: float, inventory: Inventory) -> NodeHealth:
    return health.after_inventory(inventory, rules, at(seconds))[0]


@pytest.mark.parametrize(
    ("event", "signal"),
    [
        (xid(79), Signal.FATAL),
        (xid(63), None),
        (xid(999), Signal.UNCLEAR),
        (xid(109), None),
        (xid(31), None),
        (GpuEvent(UUIDS[0], int(EventType.DOUBLE_BIT_ECC)), Signal.FATAL),
        (GpuEvent(UUIDS[0], int(EventType.UNAVAILABLE)), Signal.FATAL),
        (GpuEvent(UUIDS[0], int(EventType.POISON)), Signal.INCIDENT),
        (GpuEvent(UUIDS[0], int(EventType.MIG_CHANGED)), None),
        (GpuEvent(UUIDS[0], int(EventType.RECOVERY_ACTION)), None),
        (GpuEvent(UUIDS[0], 0x10000), None),
    ],
)
def test_an_event_has_the_class_of_its_kind(event: GpuEvent, signal: Signal | None) -> None:
    assert meaning_of(event, RULES).signal is signal


def test_a_bad_gpu_of_two_and_its_recovery() -> None:
    health = looked(UNSEEN, 0)
    health, changes = health.after_event(xid(79), RULES, at(5))
    assert [(change.uuid, change.before, change.now.state) for change in changes] == [(UUIDS[0], HEALTHY, BAD)]
    applied = health.applied_to(WELL, RULES).gpus
    assert applied[0].unavailable == "bad since 2023-11-14 22:13:25 UTC: XID 79, GPU has fallen off the bus"
    assert applied[1] == WELL.gpus[1]
    assert state(looked(health, 6)) is BAD, "a look just after says nothing yet"
    health = looked(health, 20)
    assert state(health) is RECOVERING
    assert "granted after 100 s without a fault: XID 79" in health.applied_to(WELL, RULES).gpus[0].unavailable
    assert state(looked(health, 104)) is RECOVERING
    health = looked(health, 105)
    assert state(health) is HEALTHY
    gpu = health.applied_to(WELL, RULES).gpus[0]
    assert (gpu.unavailable, gpu.health.changes, gpu.health.why) == ("", 3, "XID 79, GPU has fallen off the bus")
    assert state(health, 1) is HEALTHY


@pytest.mark.parametrize("event", [xid(31), GpuEvent(PARTS[0], int(EventType.XID), 79)], ids=["ignored", "unknown GPU"])
def test_an_event_that_changes_nothing(event: GpuEvent) -> None:
    health = looked(UNSEEN, 0)
    assert health.after_event(event, RULES, at(1)) == (health, ())


HAPPENINGS: dict[str, GpuEvent | Inventory] = {
    "xid48": xid(48, gpu=1),
    "xid79": xid(79, gpu=1),
    "xid94": xid(94, gpu=1),
    "storm": GpuEvent(UUIDS[1], int(EventType.ECC_STORM)),
    "retired": GpuEvent(UUIDS[1], int(EventType.DRAM_RETIRED)),
    "well": WELL,
    "lost": look((), (Sign.LOST,)),
    "pending": look((), (Sign.REMAP_PENDING,)),
    "hot": look((), (Sign.THERMAL, Sign.POWER_BRAKE)),
    "unreadable": look((), (Sign.UNREADABLE,)),
    "unreadable+lost": look((), (Sign.UNREADABLE, Sign.LOST)),
    "no-handle": look((), faults=(LOST_1,)),
    "no-name": look((), faults=(GpuFault(1, "Unknown Error (999)", 999, Sign.UNREADABLE),)),
    "renumbered": look(()),
}
# Of GPU 1, which was well at 0 s: seconds, what happens then, its state after it.
TIMELINES = {
    "incidents that come together are one": "1 storm suspect, 2 retired suspect, 12 storm bad",
    "an incident of a bad GPU begins the hold-down anew": "0 xid79 bad, 5 retired bad, "
    "50 well recovering, 104 well recovering, 105 well healthy",
    "so does one of a recovering GPU": "0 xid79 bad, 50 well recovering, 60 retired bad, "
    "80 well recovering, 159 well recovering, 160 well healthy",
    "bad as long as it is lost": "10 lost bad, 500 lost bad, 599 well recovering, 600 well healthy",
    "missed when nothing tells of it any more": "10 no-handle bad, 200 renumbered bad, 210 well recovering",
    "suspect as long as a sign shows": "0 pending suspect, 500 pending suspect, 599 well suspect, 600 well healthy",
    "an odd sign does not withhold it for ever": "0 xid48 bad, 100 pending recovering, 130 pending suspect",
    "signs of neither list are only shown": "5 hot healthy",
    "refreshes may come one after the other": "10 unreadable suspect, 19 unreadable suspect, 20 unreadable bad",
    "readable meanwhile": "10 unreadable suspect, 19 well suspect, "
    "30 unreadable suspect, 39 unreadable suspect, 40 unreadable bad",
    "unreadable once while it recovers": "0 xid79 bad, 20 well recovering, 21 unreadable bad",
    "unreadable once with another sign": "5 unreadable+lost bad",
    "a GPU that cannot be named": "10 no-name suspect, 20 no-name bad",
}


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
def test_states_in_time(timeline: str) -> None:
    unsure = replace(RULES, fatal_signs=RULES.fatal_signs | {Sign.UNREADABLE})
    health = looked(UNSEEN, 0)
    for step in timeline.split(", "):
        seconds, name, expected = step.split()
        happens = HAPPENINGS[name]
        if isinstance(happens, GpuEvent):
            health, _ = health.after_event(happens, unsure, at(float(seconds)))
        else:
            health, _ = health.after_inventory(happens, unsure, at(float(seconds)))
        assert state(health, 1) == expected, step


def test_a_refresh_that_failed_changes_nothing() -> None:
    health = looked(UNSEEN, 0)
    assert health.after_inventory(Inventory(taken_at=1, fault="no driver"), RULES, at(1)) == (health, ())


def test_the_file_of_the_previous_version_is_read() -> None:
    part = f'{{"uuid":"{PARTS[0]}","index":0,"gpu_instance":1,"compute_instance":0}}'
    bad = '"health":{"state":"bad","since":1700000005.0,"why":"XID 79","changes":1},"trouble_s":5.0'
    whole = f'{{"place":"0","bus_id":"0000:10:00.0","parts":[{part}]}}'
    text = f'{{"records":{{"{UUIDS[0]}":{whole},"{UUIDS[1]}":{{{bad}}}}}}}'
    health = json.decode(text, type=NodeHealth)
    assert (state(health), state(health, 1)) == (HEALTHY, BAD)
    assert health.records[UUIDS[0]].units == {PARTS[0]}
    assert health.records[UUIDS[1]].trouble_s == 5


# --- GPUs that are not there any more ---------------------------------------------------------------------------------


def held(*units: str) -> frozenset[str]:
    return frozenset(units)


def test_before_it_is_known_which_gpus_are_held_none_is_forgotten() -> None:
    health, changes = looked(UNSEEN, 0, with_parts(WELL, 1, 0)).after_inventory(look(()), RULES, at(10), None)
    assert (state(health, 1), changes) == (HEALTHY, ())
    assert health.applied_to(look(()), RULES).faults == ()
    assert health.after_inventory(look(()), RULES, at(20), held(PARTS[0]))[0].withheld.keys() == {UUIDS[1], PARTS[0]}
    assert UUIDS[1] not in health.after_inventory(look(()), RULES, at(20))[0].records


def test_a_loss_that_policy_does_not_list_makes_nothing_bad() -> None:
    easy = replace(RULES, fatal_signs=frozenset())
    for inventory in (look(()), look((), faults=(LOST_1,))):
        health, changes = looked(UNSEEN, 0).after_inventory(inventory, easy, at(10), held(UUIDS[1]))
        assert (state(health, 1), changes) == (HEALTHY, ())
    strict = replace(RULES, fatal_signs=frozenset(), suspect_signs=frozenset({Sign.LOST}))
    assert state(looked(UNSEEN, 0).after_inventory(look(()), strict, at(10), held(UUIDS[1]))[0], 1) is SUSPECT


def test_a_fault_without_a_sign_changes_nothing() -> None:
    garbled = GpuFault(1, "nvmlDeviceGetUUID: 'x' is not a GPU UUID")
    health, changes = looked(UNSEEN, 0).after_inventory(look((), faults=(garbled,)), RULES, at(10), held(UUIDS[1]))
    assert (state(health, 1), changes) == (HEALTHY, ())


@pytest.mark.parametrize(
    "fault",
    [
        GpuFault(2, "GPU is lost (15)", 15, Sign.LOST),
        GpuFault(7, "GPU is lost (15)", 15, Sign.LOST, uuid=UUIDS[2]),
        GpuFault(7, "GPU is lost (15)", 15, Sign.LOST, pci_bus_id="0000:12:00.0"),
    ],
)
def test_one_fault_is_one_gpu(fault: GpuFault) -> None:
    """GPU 1 was removed before the same refresh."""
    health, changes = looked(UNSEEN, 0, look((), (), ())).after_inventory(look((), faults=(fault,)), RULES, at(10))
    assert [change.uuid for change in changes] == [UUIDS[2]]
    assert UUIDS[1] not in health.records


def test_a_fault_whose_index_moved_is_the_one_that_is_missing() -> None:
    fault = GpuFault(5, "GPU is lost (15)", 15, Sign.LOST)
    health = looked(looked(UNSEEN, 0, look((), (), ())), 10, look((), (), faults=(fault,)))
    assert [state(health, gpu) for gpu in range(3)] == [HEALTHY, HEALTHY, BAD]


def test_with_more_missing_than_faults_none_is_bad() -> None:
    fault = GpuFault(5, "GPU is lost (15)", 15, Sign.LOST)
    health, changes = looked(UNSEEN, 0, look((), (), ())).after_inventory(look((), faults=(fault,)), RULES, at(10))
    assert (list(health.records), list(changes)) == ([UUIDS[0]], [])


def test_a_missing_gpu_has_its_uuid_in_the_inventory() -> None:
    shown = look((), faults=(LOST_1,))
    health = looked(looked(UNSEEN, 0), 10, shown)
    assert [fault.uuid for fault in health.applied_to(shown, RULES).faults] == [UUIDS[1]]
    assert health.applied_to(health.applied_to(shown, RULES), RULES) == health.applied_to(shown, RULES)


def test_a_gpu_that_nvml_does_not_list_is_a_fault_of_the_inventory() -> None:
    health = looked(UNSEEN, 0).after_inventory(look(()), RULES, at(10), held(UUIDS[1]))[0]
    (fault,) = health.applied_to(look(()), RULES).faults
    assert (fault.index, fault.uuid, fault.sign) == (1, UUIDS[1], Sign.LOST)
    assert fault.reason == "bad since 2023-11-14 22:13:30 UTC: GPU is lost: NVML does not list it any more"
    assert health.applied_to(health.applied_to(look(()), RULES), RULES) == health.applied_to(look(()), RULES)
    assert health.applied_to(WELL, RULES).faults == ()


def test_a_driver_that_invents_uuids_fills_no_memory() -> None:
    health = NodeHealth()
    for number in range(300):
        names = {"uuid": f"GPU-{number:08x}-0000-4000-8000-000000000000", "pci_bus_id": f"{number:04x}:01:00.0"}
        made_up = replace(look((Sign.LOST,)).gpus[0], **names)
        health = looked(health, number, replace(WELL, gpus=(made_up,)))
    assert len(health.records) == 257
    assert made_up.uuid in health.records


def test_a_gpu_that_was_replaced_is_forgotten_once_nobody_holds_it() -> None:
    """The new one is at its address."""
    broken = looked(looked(UNSEEN, 0), 10, look((), (Sign.LOST,)))
    now = replace(WELL, gpus=(WELL.gpus[0], replace(WELL.gpus[1], uuid=UUIDS[2])))
    for holds in (None, held(UUIDS[1])):
        health = broken.after_inventory(now, RULES, at(20), holds)[0]
        (fault,) = health.applied_to(now, RULES).faults
        assert (fault.uuid, state(health, 2)) == (UUIDS[1], HEALTHY)
    health = health.after_inventory(now, RULES, at(30), held(UUIDS[2]))[0]
    assert health.records.keys() == {UUIDS[0], UUIDS[2]}
    assert health.applied_to(now, RULES).faults == ()


# --- a fabric ---------------------------------------------------------------------------------------------------------

WAITS = (Sign.FABRIC_NOT_READY,)
DECIDES = replace(RULES, fabric=UnreadyFabric.SIGNS, suspect_signs=frozenset(WAITS))


@pytest.mark.parametrize(
    ("inventory", "rules", "withheld"),
    [
        (look(WAITS, WAITS), RULES, (True, True)),
        (look(WAITS, WAITS), DECIDES, (False, False)),
        (look(WAITS, ()), RULES, (False, False)),
        (replace(look(WAITS), nvswitches=4), RULES, (True,)),
        (look(WAITS), replace(RULES, suspect_signs=frozenset(WAITS)), (False,)),
        (look(WAITS, WAITS), replace(RULES, fatal_signs=frozenset(WAITS)), (True, True)),
    ],
    ids=["two", "signs decide", "one in a fabric", "one with switches", "one alone is suspect", "fatal, too"],
)
def test_a_gpu_waits_for_its_fabric(inventory: Inventory, rules: HealthSettings, withheld: tuple[bool, ...]) -> None:
    """As long as it shows, without a state of health; where that decides nothing, the signs do."""
    health = looked_by(rules, UNSEEN, 0, inventory)
    found = health.applied_to(inventory, rules).gpus
    assert tuple(gpu.unavailable == NOT_READY for gpu in found) == withheld
    suspect = not any(withheld) and Sign.FABRIC_NOT_READY in rules.suspect_signs
    assert {gpu.health.state for gpu in found} == {SUSPECT if suspect else HEALTHY}
    assert health.withheld == {}
    ready = replace(inventory, gpus=tuple(replace(gpu, signs=()) for gpu in inventory.gpus))
    assert not any(gpu.unavailable for gpu in looked_by(rules, health, 1, ready).applied_to(ready, rules).gpus)


def test_a_fabric_that_is_up_on_one_gpu_withholds_the_other() -> None:
    up = Fabric(FabricState.COMPLETED)
    inventory = look((), WAITS)
    inventory = replace(inventory, gpus=(replace(inventory.gpus[0], fabric=up), inventory.gpus[1]))
    assert waiting(inventory, RULES) == {UUIDS[1]}


# --- MIG devices ------------------------------------------------------------------------------------------------------

PARTITIONED = with_parts(WELL, 1, 0, 1)


def of_part(number: int, place: int = 0) -> GpuEvent:
    return GpuEvent(UUIDS[1], int(EventType.XID), number, place + 1, 0)


def test_mig_devices_are_withheld_with_a_gpu_that_cannot_list_them() -> None:
    health = looked(looked(UNSEEN, 0, PARTITIONED), 10, look((), faults=(LOST_1,)))
    assert health.withheld.keys() == {UUIDS[1], *PARTS[:2]}
    mute = look((), (Sign.LOST,))
    mute = replace(mute, gpus=(mute.gpus[0], replace(mute.gpus[1], unavailable="nvmlDeviceGetName: GPU is lost (15)")))
    health = looked(looked(UNSEEN, 0, PARTITIONED), 10, mute)
    assert health.withheld.keys() == {UUIDS[1], *PARTS[:2]}


def test_mig_devices_that_were_removed_are_not_withheld() -> None:
    health = looked(looked(UNSEEN, 0, PARTITIONED), 10, WELL).after_event(xid(79, gpu=1), RULES, at(20))[0]
    assert health.withheld.keys() == {UUIDS[1]}


def test_an_incident_of_one_mig_device_is_its_own() -> None:
    bad = replace(RULES, other_xids=RULES.other_xids.BAD)
    health, changes = looked(UNSEEN, 0, PARTITIONED).after_event(of_part(94), bad, at(5))
    assert [(change.uuid, change.place, change.now.state) for change in changes] == [(PARTS[0], "1:0", BAD)]
    assert health.withheld.keys() == {PARTS[0]}
    gpu = health.applied_to(PARTITIONED, bad).gpus[1]
    assert gpu.unavailable == ""
    assert [device.unavailable[:10] for device in gpu.mig] == ["bad since ", ""]
    assert health.applied_to(health.applied_to(PARTITIONED, bad), bad) == health.applied_to(PARTITIONED, bad)
    health = health.after_inventory(PARTITIONED, bad, at(20))[0]
    assert health.records[PARTS[0]].health.state is RECOVERING
    assert health.after_inventory(PARTITIONED, bad, at(105))[0].withheld == {}


def test_an_unclear_xid_of_one_mig_device_makes_that_suspect_however_often() -> None:
    health = looked(UNSEEN, 0, PARTITIONED)
    for seconds in range(5, 500, 45):
        health = health.after_event(of_part(145), RULES, at(seconds))[0]
    states = {uuid: record.health.state for uuid, record in health.records.items()}
    assert states == {UUIDS[0]: HEALTHY, UUIDS[1]: HEALTHY, PARTS[0]: SUSPECT}


@pytest.mark.parametrize(
    "event",
    [
        of_part(79),  # what the operator calls fatal is never one part's
        of_part(46),  # nor is what asks for a reset
        of_part(94, place=2),  # an unknown MIG device
        GpuEvent(UUIDS[1], int(EventType.XID), 94, None, None),
        GpuEvent(UUIDS[1], int(EventType.XID), 94, 1, None),
        GpuEvent(UUIDS[1], int(EventType.DOUBLE_BIT_ECC), 0, 1, 0),
    ],
)
def test_all_other_events_are_the_whole_gpus(event: GpuEvent) -> None:
    bad = replace(RULES, other_xids=RULES.other_xids.BAD)
    assert looked(UNSEEN, 0, PARTITIONED).after_event(event, bad, at(5))[0].withheld.keys() == {UUIDS[1], *PARTS[:2]}


def test_a_mig_device_that_is_made_again_is_another_one() -> None:
    health = looked(UNSEEN, 0, PARTITIONED).after_event(of_part(145), RULES, at(5))[0]
    assert PARTS[0] in health.records
    assert PARTS[0] not in looked(health, 10, with_parts(WELL, 1, 1)).records
    assert PARTS[0] in looked(health, 10, look((), faults=(LOST_1,))).records, "its GPU only hides"
