from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import NEWER_MASK, OLDEST_MASK, Event, Subscription, event_mask, holds_list_back

VERSIONS = {
    "not given, as below 0.12": ("", OLDEST_MASK),
    "first with the new": ("0.10.0", NEWER_MASK),
    "as Go prints it": ("v0.12.1", NEWER_MASK),
    "candidate": ("v0.10.0-rc.1", NEWER_MASK),
    "two numbers": ("0.12", NEWER_MASK),
    "compared by number": ("0.9.99", OLDEST_MASK),
    "of a workspace": ("(devel)", OLDEST_MASK),
    "half a number": ("0.12x", OLDEST_MASK),
    "another script": ("0.\u0661\u0662", OLDEST_MASK),
    "a blank in front": (" 0.12.0", OLDEST_MASK),
    "too long to be one": ("0." + "9" * 5000, OLDEST_MASK),
}


@pytest.mark.parametrize(("version", "mask"), VERSIONS.values(), ids=VERSIONS)
def test_the_mask_keeps_within_what_the_runtime_knows(version: str, mask: int) -> None:
    assert event_mask(list(Event), version) == mask
    assert event_mask([Event.CREATE_CONTAINER, Event.RUN_POD_SANDBOX, Event.RUN_POD_SANDBOX], version) == 0b1001


@pytest.mark.parametrize("events", [(), (Event.VALIDATE_CONTAINER_ADJUSTMENT,)], ids=["none", "none it knows"])
def test_no_event_at_all_is_an_error_because_zero_means_all(events: tuple[Event, ...]) -> None:
    with pytest.raises(ValueError, match="mask 0"):
        event_mask(events, "0.9.0")


def test_events_are_numbered_as_in_the_proto() -> None:
    names = {value: name for name, value in pb.Event.items() if name not in ("UNKNOWN", "LAST")}
    assert {event.value: event.name for event in Event} == names


VALIDATING = (Event.CREATE_CONTAINER, Event.VALIDATE_CONTAINER_ADJUSTMENT)
RUNTIMES = {
    "containerd of sid": ("containerd", "2.1.9+unknown", "", False),
    "the first with NRI 0.10": ("containerd", "2.2.0", "", True),
    "its candidate, which may have an older one": ("containerd", "2.2.0-rc.1", "", False),
    "a distribution's": ("containerd", "2.2.1~ds1-1", "", True),
    "it says so itself": ("containerd", "2.4.0-beta+unknown", "v0.12.1", True),
    "it says something else": ("containerd", "2.4.0", "(devel)", False),
    "it says an old one": ("containerd", "2.4.0", "0.9.0", False),
    "CRI-O": ("cri-o", "1.34.0", "", True),
    "CRI-O before": ("cri-o", "1.33.9", "", False),
    "Docker": ("docker", "29.2.0", "", True),
    "no version": ("containerd", "", "", False),
}


@pytest.mark.parametrize(("runtime", "version", "nri", "validates"), RUNTIMES.values(), ids=RUNTIMES)
def test_who_validates(runtime: str, version: str, nri: str, validates: bool) -> None:
    subscription = Subscription()
    mask = subscription.mask(VALIDATING, runtime, version, nri)
    assert mask == event_mask(VALIDATING, "0.10" if validates else "")
    assert subscription.validates is validates


def test_one_that_hangs_up_is_asked_for_less_once() -> None:
    subscription = Subscription()
    masks = []
    for ended_at_once in (True, True, False, False):
        masks.append(subscription.mask(VALIDATING, "containerd", "2.2.0", ""))
        subscription.ended(after_configure=ended_at_once)
    daring, oldest = event_mask(VALIDATING, "0.10"), event_mask(VALIDATING, "")
    assert masks == [daring, oldest, daring, daring]


HOLDING = {
    "1.7.24~ds1": False,
    "1.7.25": False,
    "1.7.26": True,
    "v1.7.34": True,
    "2.0.2": False,
    "2.0.3-k3s1": True,
    "2.1.0-rc.1": True,
    "2.4.2+unknown": True,
    "": True,
    "(devel)": True,
    "1.7": True,
}


@pytest.mark.parametrize(("version", "holds"), HOLDING.items(), ids=HOLDING)
def test_who_may_keep_a_plugin_waiting_for_its_list(version: str, holds: bool) -> None:
    assert holds_list_back("containerd", version) is holds
    assert holds_list_back("cri-o", version)
