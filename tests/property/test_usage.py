"""Laws of samples: nothing is shown that cannot be true, and idle is what every sample since then shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.domain.sample import MEMORY_MAX, PID_MAX, ProcessSample, UnitSample, read_units
from nri_gpu.usage.idle import HolderLook, HolderUse, after, used
from tests.support import builders as make

PROCESSES = st.frozensets(st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=2)


@st.composite
def looks(draw: st.DrawFn) -> Sequence[HolderLook]:
    told = draw(
        st.lists(
            st.tuples(
                st.one_of(st.none(), PROCESSES),
                st.sampled_from([1, 2, None]),
                st.sampled_from([True, False, False, False, None]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    return [HolderLook(at=at, processes=each, memory_bytes=size, used=use) for at, (each, size, use) in enumerate(told)]


def seen(each: Sequence[HolderLook]) -> HolderUse:
    use = None
    for one in each:
        use = after(use, one)
    assert use
    return use


def goes_on(before: HolderLook, look: HolderLook) -> bool:
    """Whether a holder with processes did nothing between two looks."""
    assert before.processes is not None and look.processes is not None
    return look.processes <= before.processes and look.memory_bytes == before.memory_bytes


@given(looks())
def test_no_process_is_said_of_exactly_the_samples_without_one(each: Sequence[HolderLook]) -> None:
    idle = seen(each).idle
    without = 0
    for look in reversed(each):
        if look.processes is None or look.processes:
            break
        without += 1
    assert (idle is not None and idle.no_process) == (without > 0)
    if idle and idle.no_process:
        assert (idle.samples, idle.since) == (without, each[-without].at)


@given(looks())
def test_no_use_is_said_only_of_samples_that_show_none(each: Sequence[HolderLook]) -> None:
    idle = seen(each).idle
    if idle is None or idle.no_process:
        return
    last = each[-idle.samples :]
    assert last[0].at == idle.since
    assert all(look.processes and look.used is False for look in last)
    assert all(goes_on(before, look) for before, look in pairwise(last))


@given(looks())
def test_use_that_is_seen_ends_it(each: Sequence[HolderLook]) -> None:
    before, last = each[-2] if len(each) > 1 else None, each[-1]
    idle = seen(each).idle
    changed = before and before.processes is not None and last.processes and not goes_on(before, last)
    unseen = last.processes is None or (last.processes and last.used is not False)
    assert (idle is None) == bool(unseen or changed)


PROCESS_SAMPLES = st.lists(st.sampled_from([True, False, None]), max_size=3)
RATES = st.one_of(st.none(), st.integers(0, 100))


@given(PROCESS_SAMPLES, PROCESS_SAMPLES, RATES)
def test_a_holder_is_told_from_others_on_its_gpu(
    own: Sequence[bool | None], others: Sequence[bool | None], rate: int | None
) -> None:
    processes = tuple(ProcessSample(pid, used=each) for pid, each in enumerate([*own, *others], 1))
    unit = UnitSample(uuid=make.uuid(0), utilization_percent=rate, memory_rate_percent=rate and 0, processes=processes)
    answer = used(unit, processes[: len(own)])
    if True in own:
        assert answer is True
    elif rate == 0:
        assert answer is False
    elif rate and not others:
        assert answer is True
    elif None in own:
        assert answer is None, "the use of others is nobody's idleness, and nobody's use"
    elif rate and True not in others:
        assert answer is None, "somebody used it, and of nobody it is told"
    else:
        assert answer is False


NUMBERS = st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.text(max_size=3))
UNITS = st.fixed_dictionaries(
    {"uuid": st.text(max_size=3)},
    optional={
        **{name: NUMBERS for name in UnitSample.__struct_fields__ if name not in ("uuid", "processes")},
        "processes": st.one_of(
            st.none(), st.lists(st.fixed_dictionaries({"pid": NUMBERS, "memory_bytes": NUMBERS}), max_size=3)
        ),
    },
)


@given(st.lists(UNITS, max_size=3))
def test_whatever_a_driver_says_nothing_is_shown_that_cannot_be_true(report: Sequence[object]) -> None:
    try:
        units = read_units(report)
    except ValueError:
        return
    for unit in units:
        total = unit.memory_total_bytes or MEMORY_MAX
        sizes = [unit.memory_used_bytes, *(each.memory_bytes for each in unit.processes or ())]
        assert all(size is None or 0 <= size <= total for size in sizes)
        rates = (unit.utilization_percent, unit.memory_rate_percent)
        assert all(rate is None or 0 <= rate <= 100 for rate in rates)
        assert all(0 < each.pid <= PID_MAX for each in unit.processes or ())
