"""Laws of health, whatever happens in whatever order: no flapping, nothing bad is granted, everything recovers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import json
from msgspec.structs import replace

from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.domain.health import RESETS, EventType, GpuEvent, HealthState, RecoveryAction, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.gpu_record import GpuRecord, Witness
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.health.xids import APPLICATIONS, XIDS, ActionClass, class_of
from nri_gpu.policy.health_settings import HealthSettings, ResetBy
from tests.support.health import PARTS, RULES, UUIDS, at, look, with_parts, xid

NUMBERS = st.sampled_from([31, 48, 63, 79, 94, 145])
SIGNS = st.sets(st.sampled_from(list(Sign)), max_size=2).map(lambda found: tuple(sorted(found)))
HAPPENINGS = st.lists(
    st.tuples(
        st.integers(0, 40),  # seconds until it
        st.one_of(
            NUMBERS.map(lambda number: ("xid", number)), SIGNS.map(lambda found: ("look", found)), st.just(("gone", ()))
        ),
    ),
    max_size=40,
)


@given(HAPPENINGS)
@example([(0, ("look", (Sign.REMAP_PENDING,))), *[(10, ("xid", 94))] * 3])
def test_laws(happenings: list[tuple[int, tuple[str, object]]]) -> None:
    now, node, last_trouble = 0.0, NodeHealth().after_inventory(look((), ()), RULES, at(0))[0], float("-inf")
    for pause_s, (what, detail) in happenings:
        now += pause_s
        before = node.records[UUIDS[0]].health
        if what == "xid":
            assert isinstance(detail, int)
            node, _ = node.after_event(xid(detail), RULES, at(now))
            fatal = detail in RULES.fatal_xids
            shown = look((), ())
        elif what == "look":
            assert isinstance(detail, tuple)
            shown, fatal = look(detail, ()), bool(RULES.fatal_signs & set(detail))
            node, _ = node.after_inventory(shown, RULES, at(now))
        else:
            shown, fatal = look((), (), faults=(GpuFault(2, "?"),)), False
            node, _ = node.after_inventory(shown, RULES, at(now))
        last_trouble = now if fatal else last_trouble
        health, soon = node.records[UUIDS[0]].health, node.records[UUIDS[0]].reset_soon
        gpu, other = node.applied_to(shown, RULES).gpus
        if fatal:
            assert health.state is HealthState.BAD
        # What is bad, recovering or soon to be reset is granted to nobody, and the other GPU does not suffer.
        assert bool(why_not(gpu)) == (soon or not health.grantable)
        assert not why_not(other)
        # From one grantable state to the next there is a whole hold-down in between.
        if health.grantable and not before.grantable:
            assert now - last_trouble >= RULES.hold_down_s
        if health.state is HealthState.HEALTHY and before.state is HealthState.SUSPECT:
            assert now - (before.since - 1_700_000_000) >= RULES.hold_down_s
        assert health.changes - before.changes == (health.state is not before.state)
    for _ in range(3):  # whatever it was, a quiet time ends it
        now += RULES.hold_down_s
        node, _ = node.after_inventory(look((), ()), RULES, at(now))
    assert node.records[UUIDS[0]].health.state is HealthState.HEALTHY


EVENTS = st.lists(st.tuples(st.sampled_from([31, 79, 94]), st.sampled_from([None, *range(2)])), max_size=4)


@given(EVENTS, EVENTS, st.booleans())
def test_an_earlier_inventory_is_in_force_with_the_worse_of_what_is_known(
    before: list[tuple[int, int | None]], since: list[tuple[int, int | None]], file_is_lost: bool
) -> None:
    """Of whole GPUs and MIG devices: the inventory is written after the events before, and the file after all."""
    inventory = with_parts(look((), ()), 0, 0, 1)
    health = NodeHealth().after_inventory(inventory, RULES, at(0))[0]

    def after(events: list[tuple[int, int | None]]) -> NodeHealth:
        node = health
        for number, place in events:
            part = (None, None) if place is None else (place + 1, 0)
            node = node.after_event(GpuEvent(UUIDS[0], EventType.XID, number, *part), RULES, at(1))[0]
        return node

    health = after(before)
    recalled = health.applied_to(inventory, RULES)
    known = NodeHealth() if file_is_lost else after(since)
    shown = known.with_recalled(recalled, at(2)).applied_to(recalled, RULES)
    answered = known.with_recalled(recalled, at(2)).after_inventory(inventory, RULES, at(3))[0]
    for earlier, now, then in zip(*map(units, (recalled, shown, answered.applied_to(inventory, RULES))), strict=True):
        saved = known.records.get(now.uuid, GpuRecord()).health
        assert now.health.grantable == then.health.grantable == (earlier.health.grantable and saved.grantable)
        assert now.health.grantable or now.unavailable


def units(inventory: Inventory) -> list[Gpu | MigDevice]:
    found: list[Gpu | MigDevice] = []
    for gpu in inventory.gpus:
        found += (gpu, *gpu.mig)
    return found


# What no program can help causing, or can cause as often as it likes.
HARMLESS = sorted(
    {number for number in XIDS if class_of(number) in (ActionClass.NOTHING, ActionClass.RESTART)} | APPLICATIONS
)
DEFAULT = HealthSettings()


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(HARMLESS), st.booleans(), st.booleans()), max_size=60),
    st.sampled_from([None, RecoveryAction.NONE, RecoveryAction.DRAIN_P2P]),
    st.sampled_from(ResetBy),
)
def test_no_number_of_harmless_events_takes_a_gpu_from_others(
    events: list[tuple[int, int, bool, bool]], action: RecoveryAction | None, reset: ResetBy
) -> None:
    """Of NVIDIA's catalogue: nothing, restart the application, and what its device plugin calls an application's."""
    rules, now, shown = replace(DEFAULT, reset=reset), 0.0, with_parts(look((), ()), 0, 0)
    shown = replace(shown, gpus=tuple(replace(gpu, recovery_action=action) for gpu in shown.gpus))
    node, _ = NodeHealth().after_inventory(shown, rules, at(0))
    for pause_s, number, of_part, looks in events:
        now += pause_s
        place = {"gpu_instance": 1, "compute_instance": 0} if of_part else {}
        node, changes = node.after_event(replace(xid(number), **place), rules, at(now))
        assert not changes
        if looks:
            node, changes = node.after_inventory(shown, rules, at(now))
            assert not changes
        assert not node.withheld
        assert not node.offered_to_nobody(frozenset())
        assert node.applied_to(shown, rules, frozenset()) == shown


STEPS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.one_of(
            st.sampled_from([46, 48, 62, 69, 79, 94, 95, 109, 145, 173]).map(xid),
            st.sampled_from(EventType).map(lambda kind: GpuEvent(UUIDS[0], int(kind))),
            st.sampled_from([None, *RecoveryAction]),
        ),
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from(ResetBy))
@example([(0, xid(46)), (0, GpuEvent(UUIDS[0], int(EventType.ECC_STORM))), (300, RecoveryAction.NONE)], ResetBy.PROOF)
def test_laws_of_resets(steps: list[tuple[int, GpuEvent | RecoveryAction | None]], reset: ResetBy) -> None:
    """A GPU that owes a reset is granted to nobody, nor is one that the driver calls broken; NONE ends what it owes."""
    rules, now = replace(DEFAULT, reset=reset), 0.0
    node, _ = NodeHealth().after_inventory(look((), ()), rules, at(now))
    for pause_s, step in steps:
        now += pause_s
        before = node.records[UUIDS[0]]
        if isinstance(step, GpuEvent):
            node, changes = node.after_event(step, rules, at(now), "boot/1")
        else:
            gpu, other = look((Sign.RESET_REQUIRED,) if step in RESETS else (), ()).gpus
            shown = Inventory(taken_at=1.0, gpus=(replace(gpu, recovery_action=step), other))
            node, changes = node.after_inventory(shown, rules, at(now), module="boot/1")
        record = node.records[UUIDS[0]]
        if record.reset and reset is ResetBy.PROOF:
            assert not record.health.grantable
        if step in RESETS:
            assert record.health.state is HealthState.BAD
        if step is RecoveryAction.NONE:
            assert record.reset is None
            assert Witness.CATALOGUE not in record.words
            if before.words.keys() == {Witness.CATALOGUE}:
                assert record.health.severity <= before.health.severity
        # Words and the course without them come and go together, and a healthy GPU has neither.
        assert bool(record.words) == (record.without is not None)
        assert not (record.words and record.health.state is HealthState.HEALTHY)
        assert record.health.changes - before.health.changes == len(changes) <= 1
        assert json.decode(json.encode(node), type=NodeHealth) == node
        assert node.records[UUIDS[1]].health.state is HealthState.HEALTHY


@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), max_size=2),
    st.sets(st.sampled_from([*UUIDS, *PARTS])),
)
def test_laws_of_the_missing(looks: list[set[int]], faults: list[int], held: set[str]) -> None:
    """Whoever comes and goes: what is held and not there is bad, what is there and well is granted, none is two."""
    node, blamed = NodeHealth(), tuple(GpuFault(index, "lost", 15, Sign.LOST) for index in sorted(set(faults)))
    for now, there in enumerate(looks):
        whole = with_parts(look((), (), ()), 1, 0)
        kept = tuple(gpu for gpu in whole.gpus if gpu.index in there)
        shown = replace(whole, gpus=kept, faults=tuple(fault for fault in blamed if fault.index not in there))
        node, changes = node.after_inventory(shown, RULES, at(now), frozenset(held))
        present = {gpu.uuid for gpu in kept}
        assert all(uuid in node.withheld for uuid in held if uuid.startswith("GPU-") and uuid not in present)
        assert len({change.uuid for change in changes}) == len(changes)
        assert {record for record in node.records if record.startswith("GPU-")} <= {*UUIDS}
        dressed = node.applied_to(shown, RULES)
        assert [gpu.uuid for gpu in dressed.gpus] == [gpu.uuid for gpu in kept]
        assert len(dressed.faults) <= len(shown.faults) + len(UUIDS)
        named = [fault.uuid for fault in dressed.faults if fault.uuid]
        assert len(set(named)) == len(named)
        assert not present.intersection(named)
