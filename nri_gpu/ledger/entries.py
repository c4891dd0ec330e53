"""The entries of the ledger after an event: grants, and the devices and processes of containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import reduce
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.events import (
    AllocationKnown,
    ClaimPrepared,
    ClaimReleased,
    ClaimsInQuestion,
    ClaimsJoined,
    Created,
    FoundAtStart,
    Gone,
    HeldForLong,
    LedgerEvent,
    ListedDevice,
    NeverStarted,
    PodGone,
    PostStarted,
    ProcessesFound,
    Reconciled,
    Removed,
    Rules,
    Sought,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.holders import UNUSED, taken
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger, without
from nri_gpu.ledger.reservations import has_listed

STARTS_S: Final = 2.0  # for how long a start goes on that is to be stopped


def entries_after(ledger: Ledger, event: LedgerEvent, rules: Rules) -> Ledger:
    """Return the ledger with its entries, claims, devices and processes after an event."""
    match event:
        case Created(at, container, grant, live):
            after = superseded(ledger, container, at)
            if grant:
                after = after.with_entry(_created(container, grant, at))
            return after.with_live(live) if live else after
        case FoundAtStart(at, live, grant):
            after = ledger.with_entry(Entry(grant, GrantPhase.LAPSED, at)) if grant else ledger
            return after.with_live(live) if live else after
        case Started():
            return _started(ledger, event)
        case PostStarted(at, container_id):
            return _runs(ledger, container_id, at)
        case Stopped():
            return _stopped(ledger, event)
        case Removed(at, container_ids):
            return _over(ledger, container_ids, at)
        case Gone(_, container_ids):
            return ledger.without_containers(container_ids)
        case NeverStarted(at, container_ids):
            return _lapsed(ledger, container_ids, at)
        case Ticked(at):
            unstarted = ledger.overdue(at, rules.created_grace_s) - ledger.processes.keys()
            return _lapsed(_given_up(ledger, at), unstarted, at)
        case PodGone(at, pod_id):
            return _pod_gone(ledger, pod_id, at)
        case Synchronized():
            return _rebuilt(ledger, event)
        case Sought():
            return _sought(ledger, event)
        case Reconciled(_, listed):
            return reduce(_adopted, listed, ledger)
        case AllocationKnown(_, container_id, allocation):
            return _allocated(ledger, container_id, allocation)
        case ClaimPrepared(_, claim):
            return _questioned(_prepared(ledger, claim), ledger.in_question - {claim.uid})
        case ClaimsJoined(_, claims):
            return reduce(_prepared, claims, ledger)
        case ClaimsInQuestion(_, uids):
            return _questioned(ledger, ledger.in_question | uids)
        case ClaimReleased(_, uid):
            gone = replace(ledger, claims=without(ledger.claims, {uid})) if uid in ledger.claims else ledger
            return _questioned(gone, ledger.in_question - {uid})
        case ProcessesFound(_, processes):
            return ledger.with_processes(processes)
        case HeldForLong(_, uuids) if uuids != ledger.stuck:
            return replace(ledger, stuck=uuids)
        case _:
            return ledger


def superseded(ledger: Ledger, container: Container, at: float) -> Ledger:
    """Lapse the earlier attempts at a container that never ran.

    The kubelet makes the next attempt only after the last one is dead, and a failed start sent no event. One that did
    run is left alone: its exit is reported. So is one that only the journal has, and whose process was found.
    """
    attempts = {id_: each for id_, each in ledger.attempts(container.pod.uid, container.name).items() if not each.ran}
    found = {id_ for id_, each in attempts.items() if each.remembered and id_ in ledger.processes}
    return _lapsed(ledger, attempts.keys() - found - {container.id}, at)


def _created(container: Container, grant: Grant, at: float) -> Entry:
    """Make the entry of a grant, with what a device plugin allocated; what a claim allocated stands in the claim."""
    found = container.kubelet
    allocation = found if isinstance(found, Allocated) and found.devices and not found.claims and grant.uuids else None
    return Entry(grant, GrantPhase.CREATED, at, allocation=allocation)


def _started(ledger: Ledger, event: Started) -> Ledger:
    old = ledger.entries.get(event.container_id)
    if old is None:
        return ledger
    grant = replace(old.grant, seat=event.seat) if event.seat else old.grant
    starting, unsought = {**ledger.starting, event.container_id: None}, without(ledger.unsought, {event.container_id})
    ledger = _not_lost(replace(ledger, starting=starting, unsought=unsought), event.container_id)
    return ledger.with_entry(Entry(grant, GrantPhase.RUNNING, event.at, allocation=old.allocation or event.allocation))


def _runs(ledger: Ledger, container_id: ContainerId, at: float) -> Ledger:
    """Let a container that was to be stopped during its start hold what it has, unless others hold it by now."""
    entry = ledger.entries.get(container_id)
    if entry is None or container_id not in ledger.starting:
        return ledger
    ledger = _not_starting(ledger, {container_id})
    if entry.phase is GrantPhase.RUNNING or (not entry.holds and taken(entry.grant, ledger.usage())):
        return ledger
    ledger = _not_lost(ledger, container_id)
    return ledger.with_entry(Entry(entry.grant, GrantPhase.RUNNING, at, allocation=entry.allocation))


def _not_lost(ledger: Ledger, container_id: ContainerId) -> Ledger:
    live = ledger.live.get(container_id)
    return ledger.with_live(replace(live, lost_since=None)) if live else ledger


def _stopped(ledger: Ledger, event: Stopped) -> Ledger:
    """End what ran; lapse what never ran, since it can still be started afterwards.

    containerd stops a created container without forgetting it. It does not interrupt a start either, so a container
    that it was starting may run: that is known once it says so, or STARTS_S are over.
    """
    id_, entry = event.container_id, ledger.entries.get(event.container_id)
    if event.unstarted and entry and entry.ran:
        told = ledger.starting.get(id_, event.at) is not None  # that it runs, or is to be stopped
        return ledger if told else replace(ledger, starting={**ledger.starting, id_: event.at})
    if entry is None or entry.ran or (entry.holds and id_ in ledger.may_live):
        return _over(ledger, (id_,), event.at)
    return _lapsed(ledger if event.unstarted else _not_starting(ledger, {id_}), (id_,), event.at)


def _given_up(ledger: Ledger, at: float) -> Ledger:
    """End the starts that were to be stopped STARTS_S ago, until they go on: those with a process are lost."""
    stopped = {id_ for id_, since in ledger.starting.items() if since is not None and at - since >= STARTS_S}
    over = {id_ for id_ in stopped if ledger.entries[id_].phase is GrantPhase.RUNNING}
    if not over:
        return ledger
    known = over & ledger.may_live
    after = _lapsed(_over(ledger, known, at), over - known, at)
    return replace(after, starting={id_: since for id_, since in ledger.starting.items() if id_ in after.entries})


def _not_starting(ledger: Ledger, container_ids: Set[ContainerId]) -> Ledger:
    """Forget that these containers are being started."""
    if container_ids.isdisjoint(ledger.starting):
        return ledger
    return replace(ledger, starting=without(ledger.starting, container_ids))


def _lapsed(ledger: Ledger, container_ids: Iterable[ContainerId], at: float) -> Ledger:
    """Let these, which never ran, hold nothing: the ledger knows them until they, or their pod, are removed.

    One may run all the same as long as nobody has looked for its processes.
    """
    sought = frozenset(container_ids) - ledger.unsought.keys()
    over = {id_: entry.lapsed(at) for id_ in sought if (entry := ledger.entries.get(id_)) and entry.holds}
    return replace(ledger, entries={**ledger.entries, **over}) if over else ledger


def _over(ledger: Ledger, container_ids: Iterable[ContainerId], at: float) -> Ledger:
    """End these containers; a container whose processes can be looked at, or for, is lost until it has none.

    A process can outlive the first one, and a runtime may not list a container that runs.
    """
    ids = frozenset(container_ids)
    ledger = _not_starting(ledger, ids)
    held = ids & ledger.may_live
    entries = {id_: entry for id_ in held if (entry := ledger.entries.get(id_)) and entry.holds and entry.grant.held}
    lives = {id_: live for id_ in held if (live := ledger.live.get(id_))}
    lost = {
        id_: Entry(each.grant, GrantPhase.LOST, at, allocation=each.allocation)
        for id_, each in entries.items()
        if not each.lost
    }
    ended = {id_: replace(each, lost_since=at) for id_, each in lives.items() if each.lost_since is None}
    if lost or ended:
        ledger = replace(ledger, entries={**ledger.entries, **lost}, live={**ledger.live, **ended})
    return ledger.without_containers(ids - entries.keys() - lives.keys())


def _pod_gone(ledger: Ledger, pod_id: PodId, at: float) -> Ledger:
    """End all containers of a sandbox."""
    ours = [id_ for id_, entry in ledger.entries.items() if entry.grant.pod_id == pod_id]
    for others in (ledger.external, ledger.live):
        ours += [id_ for id_, other in others.items() if other.pod_id == pod_id]
    after = _over(ledger, ours, at)
    left = {id_: replace(after.entries[id_], pod_gone=True) for id_ in ours if id_ in after.entries}
    return replace(after, entries={**after.entries, **left}) if left else after


def _allocated(ledger: Ledger, container_id: ContainerId, allocation: Allocated) -> Ledger:
    entry = ledger.entries.get(container_id)
    if entry is None or entry.allocation == allocation:
        return ledger
    return ledger.with_entry(replace(entry, allocation=allocation))


def _adopted(ledger: Ledger, listed: ListedDevice) -> Ledger:
    """Add a device that PodResources lists for a container to what the kubelet allocated to it."""
    for id_, entry in ledger.entries.items():
        if entry.holds and has_listed(entry.grant, listed) and entry.grant.container_name == listed.container:
            known = entry.allocation or Allocated(shared=listed.shared)
            devices = tuple(dict.fromkeys((*known.devices, listed.device)))
            ledger = _allocated(ledger, id_, Allocated(devices, known.shared))
    return ledger


def _prepared(ledger: Ledger, claim: PreparedClaim) -> Ledger:
    """Put a claim in place of any with its UID."""
    if ledger.claims.get(claim.uid) == claim:
        return ledger
    return replace(ledger, claims={**ledger.claims, claim.uid: claim})


def _questioned(ledger: Ledger, uids: frozenset[ClaimUid]) -> Ledger:
    return ledger if uids == ledger.in_question else replace(ledger, in_question=uids)


def _rebuilt(ledger: Ledger, event: Synchronized) -> Ledger:
    """Build the entries anew from the runtime's list. A container that the list lacks has not ended by that.

    External allocations, releasing GPUs and claims stay: no list shows them.
    """
    processes = {**ledger.processes, **event.processes}
    # A container that only the journal has, and that has processes, was started while nobody told us.
    remembered = {each.grant.container_id: each for each in event.remembered}
    unseen = {id_: each for id_, each in remembered.items() if id_ in processes and id_ not in ledger.entries}
    unsought = dict.fromkeys(event.unsought - processes.keys(), event.at)
    before = replace(ledger, entries={**ledger.entries, **unseen}, processes=processes, unsought=unsought)
    # Of what the runtime may still be creating, it says nothing yet.
    created = {id_ for id_ in remembered if (entry := ledger.entries.get(id_)) is None or not entry.ran}
    unlisted = processes.keys() | (unsought.keys() - created)
    old = _over(before, unlisted - event.ids, event.at)
    lost = (old.lost.keys() & before.may_live) - event.ids
    there = event.ids | lost
    entries = [
        *(each for id_, each in old.entries.items() if id_ in lost),
        *event.entries,
        *(each for each in event.remembered if each.grant.container_id not in there),
    ]
    lives = [*(each for id_, each in old.live.items() if id_ in lost), *event.lives]
    anew = replace(
        old,
        entries=_settled(entries, replace(old, external={}, reservations={})),
        live={each.container_id: each for each in lives},
        processes={},
        starting={},
    )
    held = anew.entries.keys() | anew.live.keys()
    anew = replace(anew, unsought={id_: at for id_, at in anew.unsought.items() if id_ in held})
    there &= held
    return anew.with_processes({id_: each for id_, each in old.processes.items() if id_ in there})


def _sought(ledger: Ledger, event: Sought) -> Ledger:
    """End the lost containers of which a whole walk found no process. A walk tells nothing of a list after its begin.

    What may still be created lapses if others hold its GPUs, or in its time, and what is listed goes on.
    """
    sought = {id_ for id_ in event.container_ids if ledger.unsought.get(id_, event.at) <= event.began}
    found = {id_: each for id_, each in event.found.items() if id_ in ledger.entries or id_ in ledger.live}
    after = ledger.with_processes(found)
    absent = (sought & after.unsought.keys()) - found.keys()
    if not absent:
        return after
    after = replace(after, unsought=without(after.unsought, absent)).without_containers(absent & after.lost.keys())
    return replace(after, entries=_settled(after.entries.values(), replace(after, external={}, reservations={})))


def _settled(listed: Iterable[Entry], ledger: Ledger) -> Mapping[ContainerId, Entry]:
    """Choose who holds among the entries of a list, so that no two hold one GPU.

    The list does not say which created containers had lapsed. A created container has lapsed if another container now
    holds its GPUs. If two created containers claim a GPU, the first listed keeps it. If nobody took its GPUs, a created
    container holds them again, for another grace. External allocations do not count: they may be newer than the grant.
    ledger: what else counts.
    """
    entries = tuple(listed)
    kept = {entry.grant.container_id: entry for entry in entries if entry.ran}
    usage = dict(replace(ledger, entries=kept).usage())
    for entry in (entry for entry in entries if not entry.ran):
        id_ = entry.grant.container_id
        gone = entry.phase is GrantPhase.CREATED and id_ not in ledger.unsought and taken(entry.grant, usage)
        kept[id_] = entry.lapsed(entry.since) if gone else entry
        for uuid in entry.grant.held if kept[id_].holds else ():
            use = usage.get(uuid, UNUSED)
            if use.mode is None or use.mode is Mode.EXCLUSIVE:  # one that shares it more keeps nobody from it
                usage[uuid] = replace(use, grants={**use.grants, id_: entry.grant})
    return kept
