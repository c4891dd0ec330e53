"""Laws of health, whatever happens in whatever order: no flapping, nothing bad is granted, everything recovers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.gpu import GpuFault
from nri_gpu.domain.health import Sign, State
from nri_gpu.health.fleet import Fleet
from tests.support.health import RULES, UUIDS, at, look, xid

XIDS = st.sampled_from([31, 48, 63, 79, 94])
SIGNS = st.sets(st.sampled_from(list(Sign)), max_size=2).map(lambda found: tuple(sorted(found)))
HAPPENINGS = st.lists(
    st.tuples(
        st.integers(0, 40),  # seconds until it
        st.one_of(
            XIDS.map(lambda number: ("xid", number)), SIGNS.map(lambda found: ("look", found)), st.just(("gone", ()))
        ),
    ),
    max_size=40,
)


@given(HAPPENINGS)
def test_laws(happenings: list[tuple[int, tuple[str, object]]]) -> None:
    now, fleet, last_trouble = 0.0, Fleet().looked(look((), ()), RULES, at(0))[0], float("-inf")
    for pause_s, (what, detail) in happenings:
        now += pause_s
        before = fleet.records[UUIDS[0]].health
        if what == "xid":
            assert isinstance(detail, int)
            fleet, _ = fleet.heard(xid(detail), RULES, at(now))
            fatal = detail in RULES.fatal_xids
            shown = look((), ())
        elif what == "look":
            assert isinstance(detail, tuple)
            shown, fatal = look(detail, ()), bool(RULES.fatal_signs & set(detail))
            fleet, _ = fleet.looked(shown, RULES, at(now))
        else:
            shown, fatal = look((), (), faults=(GpuFault(2, "?"),)), False
            fleet, _ = fleet.looked(shown, RULES, at(now))
        last_trouble = now if fatal else last_trouble
        health = fleet.records[UUIDS[0]].health
        gpu, other = fleet.dressed(shown, RULES).gpus
        if fatal:
            assert health.state is State.BAD
        # What is bad or recovering is granted to nobody, and the other GPU does not suffer.
        assert bool(why_not(gpu)) == (not health.grantable)
        assert not why_not(other)
        # From one grantable state to the next there is a whole hold-down in between.
        if health.grantable and not before.grantable:
            assert now - last_trouble >= RULES.hold_down_s
        if health.state is State.HEALTHY and before.state is State.SUSPECT:
            assert now - (before.since - 1_700_000_000) >= RULES.hold_down_s
        assert health.changes - before.changes == (health.state is not before.state)
    for _ in range(3):  # whatever it was, a quiet time ends it
        now += RULES.hold_down_s
        fleet, _ = fleet.looked(look((), ()), RULES, at(now))
    assert fleet.records[UUIDS[0]].health.state is State.HEALTHY
