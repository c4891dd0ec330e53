"""What NVIDIA's catalogue says of each XID, and what the policy makes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.health import EventType, GpuEvent
from nri_gpu.health.states import Meaning, Signal, meaning_of
from nri_gpu.health.xids import APPLICATIONS, CLASSES, ROWS, XIDS, Action, ActionClass, class_of, xid_name
from nri_gpu.policy.health_settings import SHIPPED_FATAL, SHIPPED_IGNORED, HealthSettings, OtherXids
from tests.support.health import UUIDS, xid

DEFAULT = HealthSettings()
RESETS = {46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158}
NUMBERS = range(1, 1000)


def test_the_catalogue_is_whole_and_has_each_number_once() -> None:
    assert [number for number, *_ in sorted(ROWS)] == list(range(1, 173))
    assert all(xid.meaning for xid in XIDS.values())
    assert set(CLASSES) == set(Action)


def signals(rules: HealthSettings) -> dict[int, Signal | None]:
    return {number: meaning_of(xid(number), rules).signal for number in NUMBERS}


def test_only_what_asks_for_a_reset_makes_a_gpu_bad() -> None:
    found = signals(DEFAULT)
    assert {number for number, signal in found.items() if signal is Signal.FATAL} == RESETS
    for number, signal in found.items():
        harmless = number in APPLICATIONS or class_of(number) in (ActionClass.NOTHING, ActionClass.RESTART)
        assert (signal is None) == harmless, number
    assert {69, 94, 137, *APPLICATIONS} <= {number for number, signal in found.items() if signal is None}
    assert {145, 154, 78, 159, 1, 172, 173, 999} <= {
        number for number, signal in found.items() if signal is Signal.UNCLEAR
    }


@pytest.mark.parametrize("given", [(), ("ignored_xids",), ("fatal_xids",), ("ignored_xids", "fatal_xids")])
def test_the_lists_that_the_file_came_with_count_as_not_given(given: tuple[str, ...]) -> None:
    shipped = {"ignored_xids": SHIPPED_IGNORED, "fatal_xids": SHIPPED_FATAL}
    assert signals(replace(DEFAULT, **{key: shipped[key] for key in given})) == signals(DEFAULT)


def test_the_operators_lists_win() -> None:
    rules = replace(DEFAULT, fatal_xids=frozenset({69, 13, 46, 500}), ignored_xids=frozenset({48, 145, 600}))
    for number in rules.fatal_xids:
        assert meaning_of(xid(number), rules) == Meaning(Signal.FATAL, xid_name(number)), "ends by quiet"
    for number in rules.ignored_xids:
        assert meaning_of(xid(number), rules).signal is None
    others = set(NUMBERS) - rules.fatal_xids - rules.ignored_xids
    changed, before = signals(rules), signals(DEFAULT)
    assert {each: changed[each] for each in others} == {each: before[each] for each in others}


@pytest.mark.parametrize(("word", "signal"), [(OtherXids.IGNORE, None), (OtherXids.BAD, Signal.FATAL)])
def test_other_xids_is_of_all_that_the_lists_do_not_have(word: OtherXids, signal: Signal | None) -> None:
    rules = replace(DEFAULT, other_xids=word, fatal_xids=frozenset({1}), ignored_xids=frozenset({2}))
    assert signals(rules) == {number: signal for number in NUMBERS} | {1: Signal.FATAL, 2: None}


@pytest.mark.parametrize("number", [0, 2**31, 2**64 - 1])
def test_a_number_that_no_driver_has(number: int) -> None:
    assert xid_name(number) == f"XID {number}, not in NVIDIA's catalogue"
    assert meaning_of(xid(number), DEFAULT).signal is Signal.UNCLEAR


def test_which_xids_are_of_the_whole_gpu() -> None:
    """Whatever MIG device they name."""
    named = {number: meaning_of(GpuEvent(UUIDS[0], int(EventType.XID), number, 1, 0), DEFAULT) for number in NUMBERS}
    assert {number for number, meaning in named.items() if meaning.whole} == RESETS
