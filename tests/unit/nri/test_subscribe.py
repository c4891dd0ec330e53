from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscribe import NEWER_MASK, OLDEST_MASK, Event, event_mask, known_mask

VERSIONS = {
    "not given, as below 0.12": ("", OLDEST_MASK),
    "last with the old mask": ("0.9.0", OLDEST_MASK),
    "first with the new": ("0.10.0", NEWER_MASK),
    "as Go prints it": ("v0.12.1", NEWER_MASK),
    "candidate": ("v0.10.0-rc.1", NEWER_MASK),
    "build": ("0.12.0+unknown", NEWER_MASK),
    "two numbers": ("0.12", NEWER_MASK),
    "next major": ("v1.0.0", NEWER_MASK),
    "compared by number": ("0.9.99", OLDEST_MASK),
    "of a workspace": ("(devel)", OLDEST_MASK),
    "one number": ("12", OLDEST_MASK),
    "no number": ("0.x", OLDEST_MASK),
    "half a number": ("0.12x", OLDEST_MASK),
    "another script": ("0.\u0661\u0662", OLDEST_MASK),
    "a blank in front": (" 0.12.0", OLDEST_MASK),
    "too long to be one": ("0." + "9" * 5000, OLDEST_MASK),
}


@pytest.mark.parametrize(("version", "mask"), VERSIONS.values(), ids=VERSIONS)
def test_the_mask_keeps_within_what_the_runtime_knows(version: str, mask: int) -> None:
    assert known_mask(version) == mask
    assert event_mask(list(Event), version) == mask


def test_a_bit_for_each_event_wanted() -> None:
    assert event_mask([Event.CREATE_CONTAINER, Event.RUN_POD_SANDBOX, Event.RUN_POD_SANDBOX], "") == 0b1001


@pytest.mark.parametrize("events", [(), (Event.VALIDATE_CONTAINER_ADJUSTMENT,)], ids=["none", "none it knows"])
def test_no_event_at_all_is_an_error_because_zero_means_all(events: tuple[Event, ...]) -> None:
    with pytest.raises(ValueError, match="mask 0"):
        event_mask(events, "0.9.0")


def test_events_are_numbered_as_in_the_proto() -> None:
    names = {value: name for name, value in pb.Event.items() if name not in ("UNKNOWN", "LAST")}
    assert {event.value: event.name for event in Event} == names
