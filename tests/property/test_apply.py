"""Laws of the ledger's events, whatever the ledger and whatever comes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, FirstProcess, PodId
from nri_gpu.domain.gpu_request import Mode
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
    DevicesPrepared,
    FoundAtStart,
    Gone,
    HeldForLong,
    LedgerEvent,
    ListedDevice,
    Looked,
    NeverStarted,
    PodGone,
    PostStarted,
    ProcessesFound,
    Reconciled,
    Removed,
    Renumbered,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.ledger.holders import DriverDevice
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger, Live
from nri_gpu.ledger.opened import live
from nri_gpu.records.journal import Journal
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import RULES
from tests.support.plugin import KEY

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
prepared = st.builds(
    lambda entry, device: DriverDevice(
        device=device,
        namespace=entry.grant.namespace,
        pod_name=entry.grant.pod_name,
        container_name=entry.grant.container_name,
        pod_id=entry.grant.pod_id,
    ),
    entries,
    st.sampled_from(["gpu-7", "gpu-6", "gpu-6-mig-1g5gb-19-0", "gpu-99", "gpu-vfio-7", "gpu"]),
)
# A runtime lists no container twice.
lists = st.lists(entries, max_size=2, unique_by=lambda entry: entry.grant.container_id).map(tuple)
processes = st.dictionaries(ids, st.builds(FirstProcess, st.integers(1, 9), st.integers(1, 9)), max_size=2)
events: st.SearchStrategy[LedgerEvent] = st.one_of(
    st.builds(lambda at, entry: Created(at, make.container(of=entry.grant.pod_name), entry.grant), ats, entries),
    st.builds(lambda at, entry: FoundAtStart(at, None, entry.grant), ats, entries),
    st.builds(Started, ats, ids, allocation=st.one_of(st.none(), allocations)),
    st.builds(PostStarted, ats, ids),
    st.builds(Stopped, ats, ids, st.booleans()),
    *(st.builds(kind, ats, some) for kind in (Removed, Gone, NeverStarted)),
    st.builds(PodGone, ats, entries.map(lambda entry: PodId(entry.grant.pod_id))),
    st.builds(Synchronized, ats, st.frozensets(ids, max_size=2), lists),
    st.builds(DevicesAllocated, ats, devices, st.booleans()),
    st.builds(
        Reconciled,
        ats,
        st.lists(listed, max_size=2).map(tuple),
        st.frozensets(st.sampled_from(DEVICES)),
        st.lists(prepared, max_size=2).map(tuple),
    ),
    st.builds(DevicesPrepared, ats, st.lists(prepared, min_size=1, max_size=2).map(tuple)),
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
    seen = here | before.processes.keys()
    assert {id_: each.grant for id_, each in after.entries.items() if each.grant.held} == {
        id_: grant for id_, grant in holders.items() if id_ in seen
    }


@st.composite
def stories_of(draw: st.DrawFn, pod_name: str, *indices: int) -> list[LedgerEvent]:
    """What may happen to the containers of one pod, on these GPUs alone."""
    of = make.pod(pod_name)
    names = [f"{pod_name}.{name}" for name in ("main", "side")]
    its = st.sampled_from([ContainerId(name) for name in names])
    own = st.lists(st.sampled_from(DEVICES[indices[0] : indices[-1] + 1]), min_size=1, unique=True).map(tuple)

    def entry_of(name: str, gpus: list[int], mode: Mode, phase: GrantPhase) -> Entry:
        return make.entry(*gpus, to=container_of(name), mode=mode, phase=phase)

    def container_of(name: str) -> Container:
        return make.container(of=of, name=name.partition(".")[2], id=ContainerId(name))

    mine = st.builds(
        entry_of,
        st.sampled_from(names),
        st.lists(st.sampled_from(indices), min_size=1, unique=True),
        st.sampled_from([Mode.EXCLUSIVE, Mode.SHARED]),
        st.sampled_from(GrantPhase),
    )
    has = st.builds(
        lambda name, minor: live(replace(container_of(name), devices=(make.held_node(make.gpu(minor)),))),
        st.sampled_from(names),
        st.sampled_from(indices),
    )

    def created(at: float, entry: Entry, given: Allocated | None, opens: Live | None) -> Created:
        container = replace(container_of(entry.grant.container_id), kubelet=given)
        opens = opens if opens and opens.container_id == container.id else None
        return Created(at, container, entry.grant, opens)

    found = st.builds(FirstProcess, st.integers(1, 9), st.integers(indices[0] + 1, indices[0] + 2))
    makes = st.builds(created, ats, mine, st.none() | st.builds(Allocated, own, st.booleans()), st.none() | has)
    first = draw(makes)
    of_pod = st.one_of(
        makes,
        st.builds(lambda at, entry: FoundAtStart(at, None, entry.grant), ats, mine),
        st.builds(Started, ats, its, allocation=st.none() | st.builds(Allocated, own)),
        st.builds(PostStarted, ats, its),
        st.builds(Stopped, ats, its, st.booleans()),
        *(st.builds(kind, ats, st.lists(its, max_size=2).map(tuple)) for kind in (Removed, Gone, NeverStarted)),
        st.builds(PodGone, ats, st.just(of.id)),
        st.builds(AllocationKnown, ats, its, st.builds(Allocated, own)),
        st.builds(ProcessesFound, ats, st.dictionaries(its, found, max_size=1)),
    )
    started = draw(st.sampled_from([[], [Started(AT, first.container.id)]]))
    return [first, *started, *draw(st.lists(of_pod, min_size=1, max_size=6))]


@given(stories_of("one", 0, 1), stories_of("two", 2, 3), st.lists(st.booleans(), max_size=16))
def test_events_of_pods_on_different_gpus_commute(
    one: list[LedgerEvent], two: list[LedgerEvent], turns: list[bool]
) -> None:
    """The runtime tells of each pod in order, and of the two in any order: the ledger is the same in the end."""
    apart, mixed = [*one, *two], []
    for first in turns:
        mixed += [queue.pop(0)] if (queue := one if first else two) else []
    assert told(Ledger(), [*mixed, *one, *two]) == told(Ledger(), apart)


FATES: Final = ("never answered", "created", "started", "removed")


@given(
    st.lists(st.tuples(st.sampled_from(FATES), st.sampled_from([Mode.EXCLUSIVE, Mode.SHARED])), max_size=4),
    st.permutations(range(4)),
)
def test_the_journal_and_the_list_give_the_holders_of_before_a_crash(
    fates: list[tuple[str, Mode]], order: list[int]
) -> None:
    """The next daemon finds each grant once: on a container that is listed, or in a line that is not settled.

    The law is about holders, not about whole entries: neither tells since when a container holds, and a line has no
    seat of MPS. A container that lapsed before the crash holds its GPUs again where nobody took them: the list does not
    say that it had. One that was not answered holds until its grace is over.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal, before, listed = Journal(path, KEY), Ledger(), list[Entry]()
        for index, (fate, mode) in enumerate(fates):
            container = make.container(of=f"pod-{index}")
            entry = make.entry(index, to=container, mode=mode, phase=GrantPhase.CREATED)
            journal.granted(entry.grant, sign_grant(entry.grant, KEY), AT)
            before = told(before, [Created(AT, container, entry.grant)])
            if fate == "created":
                listed.append(replace(entry, until=Lapse.NEVER))
            elif fate == "started":
                before = told(before, [Started(AT, container.id)])
                listed.append(replace(entry, phase=GrantPhase.RUNNING))
            elif fate == "removed":
                before = told(before, [Removed(AT, (container.id,))])
            if fate in ("started", "removed"):
                journal.settled(container.id)
        journal.close()
        remembered = tuple(
            Entry(each.grant, GrantPhase.CREATED, each.at, each.at + RULES.created_grace_s, remembered=True)
            for each in Journal(path, KEY).remembered(AT - RULES.created_grace_s)
        )
    listed.sort(key=lambda entry: order[int(entry.grant.pod_name[-1])])
    here = frozenset(each.grant.container_id for each in listed)
    anew = apply(Ledger(), Synchronized(AT + 1, here, tuple(listed), remembered), RULES)
    assert {id_: (each.grant, each.phase) for id_, each in anew.entries.items() if each.holds} == {
        id_: (each.grant, each.phase) for id_, each in before.entries.items() if each.holds
    }
