"""Laws of the ledger's events, whatever the ledger and whatever comes."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import ContainerId, FirstProcess, PodId
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.events import (
    AllocationKnown,
    ClaimPrepared,
    ClaimReleased,
    ClaimsInQuestion,
    ClaimsJoined,
    Created,
    DevicesAllocated,
    FoundAtStart,
    Gone,
    HeldForLong,
    LedgerEvent,
    ListedDevice,
    Looked,
    NeverStarted,
    PodGone,
    ProcessesFound,
    Reconciled,
    Removed,
    Renumbered,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import RULES

AT: Final = 1000.0
DEVICES: Final = tuple(AllocatedDevice("nvidia.com/gpu", make.uuid(index)) for index in range(4))
devices = st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2, unique=True).map(tuple)
allocations = st.builds(Allocated, devices, st.booleans())


@st.composite
def allocated(draw: st.DrawFn) -> Entry:
    """An entry with what the kubelet allocated to it, or without."""
    entry: Entry = draw(strategies.entries())
    own = tuple(AllocatedDevice("nvidia.com/gpu", uuid) for uuid in entry.grant.uuids)
    return replace(entry, allocation=draw(st.sampled_from([None, Allocated(own)])))


entries = allocated()
ids = entries.map(lambda entry: entry.grant.container_id)
some = st.lists(ids, max_size=2).map(tuple)
ats = st.sampled_from([AT, AT + 1, AT + 61, AT + 2000])
listed = st.builds(
    lambda entry, device, shared: ListedDevice(
        device, entry.grant.namespace, entry.grant.pod_name, entry.grant.container_name, shared
    ),
    entries,
    st.sampled_from(DEVICES),
    st.booleans(),
)
processes = st.dictionaries(ids, st.builds(FirstProcess, st.integers(1, 9), st.integers(1, 9)), max_size=2)
events: st.SearchStrategy[LedgerEvent] = st.one_of(
    st.builds(lambda at, entry: Created(at, make.container(of=entry.grant.pod_name), entry.grant), ats, entries),
    st.builds(lambda at, entry: FoundAtStart(at, None, entry.grant), ats, entries),
    st.builds(Started, ats, ids, allocation=st.one_of(st.none(), allocations)),
    st.builds(Stopped, ats, ids),
    *(st.builds(kind, ats, some) for kind in (Removed, Gone, NeverStarted)),
    st.builds(PodGone, ats, entries.map(lambda entry: PodId(entry.grant.pod_id))),
    st.builds(Synchronized, ats, st.frozensets(ids, max_size=2), st.lists(entries, max_size=2).map(tuple)),
    st.builds(DevicesAllocated, ats, devices, st.booleans()),
    st.builds(Reconciled, ats, st.lists(listed, max_size=2).map(tuple), st.frozensets(st.sampled_from(DEVICES))),
    st.builds(AllocationKnown, ats, ids, allocations),
    st.builds(ClaimPrepared, ats, strategies.prepared_claims),
    st.builds(lambda at, claim: ClaimsJoined(at, (claim,)), ats, strategies.prepared_claims),
    st.builds(ClaimsInQuestion, ats, st.just(frozenset({ClaimUid("claim-one")}))),
    st.builds(ClaimReleased, ats, st.just(ClaimUid("claim-one"))),
    st.builds(Looked, ats, st.dictionaries(st.sampled_from([each.uuid for each in DEVICES]), st.integers(0, 1))),
    st.builds(ProcessesFound, ats, processes),
    st.builds(HeldForLong, ats, st.frozensets(st.sampled_from([each.uuid for each in DEVICES]))),
    st.builds(Renumbered, ats),
    st.builds(Ticked, ats),
)
stories = st.lists(events, max_size=12)


def told(ledger: Ledger, story: list[LedgerEvent]) -> Ledger:
    for event in story:
        ledger = apply(ledger, event, RULES)
    return ledger


@given(strategies.ledgers, stories, events)
def test_an_event_that_comes_twice_changes_nothing_the_second_time(
    ledger: Ledger, story: list[LedgerEvent], event: LedgerEvent
) -> None:
    once = apply(told(ledger, story), event, RULES)
    assert apply(once, event, RULES) == once


@given(stories)
def test_a_device_is_reserved_for_nobody_while_a_container_of_its_pod_has_it(story: list[LedgerEvent]) -> None:
    ledger = told(Ledger(), story)
    for entry in ledger.entries.values():
        for device in entry.allocation.devices if entry.allocation and entry.phase is GrantPhase.RUNNING else ():
            reserved = ledger.reservations.get(device)
            assert reserved is None or reserved.pod_uid != entry.grant.pod_uid


@given(strategies.ledgers, stories, st.sampled_from([AT + 3000, AT + 1e6]))
def test_time_alone_never_lets_a_pod_hold_more(ledger: Ledger, story: list[LedgerEvent], at: float) -> None:
    before = told(ledger, story)
    after = apply(before, Ticked(at), RULES)
    held = {(each.pod_uid, uuid) for uuid, use in before.usage().items() for each in use.holders}
    assert {(each.pod_uid, uuid) for uuid, use in after.usage().items() for each in use.holders} <= held
    assert after.releasing.keys() <= before.releasing.keys()


@given(stories, events)
def test_who_left_a_gpu_had_it_alone_and_its_process_may_be_there(story: list[LedgerEvent], event: LedgerEvent) -> None:
    before = told(Ledger(), story)
    after = apply(before, event, RULES)
    alone = {uuid for each in before.entries.values() if each.used_exclusively for uuid in each.grant.uuids}
    reserved = {each.device.uuid for each in before.reservations.values() if each.until is None}
    assert after.releasing.keys() - before.releasing.keys() <= alone | reserved


@given(stories)
def test_a_list_of_what_runs_by_the_ledger_ends_nobody_whose_process_is_seen(story: list[LedgerEvent]) -> None:
    before = told(Ledger(), story)
    listed = tuple(entry for entry in before.entries.values() if entry.phase is GrantPhase.RUNNING)
    here = frozenset(ContainerId(each.grant.container_id) for each in listed)
    after = apply(before, Synchronized(AT + 5000, here, listed), RULES)
    holders = {id_: each.grant for id_, each in before.entries.items() if each.holds and each.grant.held}
    seen = {id_ for id_, each in before.entries.items() if each.ran or id_ in before.processes}
    assert {id_: each.grant for id_, each in after.entries.items() if each.grant.held} == {
        id_: grant for id_, grant in holders.items() if id_ in seen
    }
