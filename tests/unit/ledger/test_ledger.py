from __future__ import annotations

import math
import time
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess, PodId, PodUid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.apply import cleared_for
from nri_gpu.ledger.events import PodGone, Sought, Stopped, Synchronized, Ticked
from nri_gpu.ledger.holders import UNUSED, ExternalAllocation, Usage
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.ledger.reservations import reservation_of
from tests.support import builders as make
from tests.support.ledgers import GRACE_S, RULES, after

A, B, A_SIDE = make.container(of="a"), make.container(of="b"), make.container(of="a", name="side")
EXCLUSIVE, SHARED = Mode.EXCLUSIVE, Mode.SHARED
CREATED, RUNNING, LAPSED = GrantPhase.CREATED, GrantPhase.RUNNING, GrantPhase.LAPSED


def phases(ledger: Ledger) -> dict[str, GrantPhase]:
    return {name: entry.phase for name, entry in ledger.entries.items()}


MINE, OTHER = PodUid("mine"), PodUid("other")


def held(mode: Mode, *pods: PodUid) -> Usage:
    grants = [make.grant(0, mode=mode, to=make.container(of=make.pod(uid, uid=uid))) for uid in pods]
    return Usage({each.container_id: each for each in grants})


DP = {make.foreign().container_id: make.foreign(0)}
STRANGER = {each.container_id: each for each in [make.foreign(0, of="stranger")]}


def of_old_pod(pod: PodUid, mode: Mode = EXCLUSIVE) -> Usage:
    """What an earlier device plugin gave to that pod's container, and the kubelet still counts as its."""
    to = make.container(of=make.pod("plugin", uid=pod))
    each = reservation_of(AllocatedDevice("nvidia.com/gpu", make.uuid(0)), make.grant(0, to=to), mode, 0.0, None)
    return Usage(reservations={each.device: each}, external=DP)


# What is on the GPU, who asks how, and whether that is in the way.
BLOCKS = {
    "nobody, exclusive": (UNUSED, EXCLUSIVE, False),
    "nobody, shared": (UNUSED, SHARED, False),
    "another pod exclusively, exclusive": (held(EXCLUSIVE, OTHER), EXCLUSIVE, True),
    "another pod exclusively, shared": (held(EXCLUSIVE, OTHER), SHARED, True),
    "another pod shared, shared": (held(SHARED, OTHER), SHARED, False),
    "another pod shared, exclusive": (held(SHARED, OTHER), EXCLUSIVE, True),
    "own pod exclusively, exclusive": (held(EXCLUSIVE, MINE), EXCLUSIVE, False),
    "own pod exclusively, shared": (held(EXCLUSIVE, MINE), SHARED, True),
    "own pod shared, exclusive": (held(SHARED, MINE), EXCLUSIVE, True),
    "others' injector, exclusive": (Usage(external=DP), EXCLUSIVE, True),
    "others' injector, shared": (Usage(external=DP), SHARED, False),
    "own pod's, by another plugin, exclusive": (of_old_pod(MINE), EXCLUSIVE, False),
    "own pod's, by another plugin, mps": (of_old_pod(MINE, Mode.MPS), Mode.MPS, True),
    "another pod's, by another plugin, exclusive": (of_old_pod(OTHER), EXCLUSIVE, True),
    "another pod's, by another plugin, shared": (of_old_pod(OTHER), SHARED, True),
    "own pod's, and another container's": (replace(of_old_pod(MINE), external={**DP, **STRANGER}), EXCLUSIVE, True),
}


@pytest.mark.parametrize(("usage", "mode", "blocked"), BLOCKS.values(), ids=BLOCKS)
def test_who_is_in_whose_way(usage: Usage, mode: Mode, blocked: bool) -> None:
    assert usage.blocks(mode, MINE) is blocked


def test_a_gpu_that_another_plugin_gave_counts_once() -> None:
    assert of_old_pod(OTHER).load == Usage(external=DP).load == 1
    assert replace(of_old_pod(OTHER), external=STRANGER).load == 2


AGAIN = make.container(of="a", id=ContainerId("a.main.2"))
PREDECESSORS = {
    "created and never started": (make.entry(0, to=A, phase=CREATED), False),
    "lapsed": (make.entry(0, to=A, phase=LAPSED), False),
    "running": (make.entry(0, to=A, phase=RUNNING), True),
    "of another name": (make.entry(0, to=A_SIDE, phase=CREATED), True),
    "of another pod": (make.entry(0, to=B, phase=CREATED), True),
}


@pytest.mark.parametrize(("before", "stays"), PREDECESSORS.values(), ids=PREDECESSORS)
def test_for_the_next_attempt_what_never_ran_holds_nothing(before: Entry, stays: bool) -> None:
    cleared = cleared_for(make.ledger(before), AGAIN, 1.0)
    assert cleared.entries[before.grant.container_id].holds is stays


def test_the_grace_is_over_just_after_its_last_moment() -> None:
    ledger = make.ledger(make.entry(0, phase=CREATED, since=10.0))
    assert after(ledger, Ticked(10.0 + GRACE_S)) is ledger
    late = after(ledger, Ticked(10.1 + GRACE_S))
    assert [*phases(late).values()] == [LAPSED]
    assert late.usage() == {}


LATE: dict[str, tuple[Entry, tuple[Entry, ...], tuple[ExternalAllocation, ...], bool]] = {
    "nobody else": (make.entry(0, to=A, phase=LAPSED), (), (), True),
    "another pod, exclusively": (make.entry(0, to=A, phase=LAPSED), (make.entry(0, to=B),), (), False),
    "another pod, lapsed too": (make.entry(0, to=A, phase=LAPSED), (make.entry(0, to=B, phase=LAPSED),), (), True),
    "own pod": (make.entry(0, to=A, phase=LAPSED), (make.entry(0, to=A_SIDE),), (), True),
    "own pod, other mode": (make.entry(0, to=A, phase=LAPSED), (make.entry(0, to=A_SIDE, mode=SHARED),), (), False),
    "others' injector": (make.entry(0, to=A, phase=LAPSED), (), (make.foreign(0),), False),
    "others' injector, shared": (make.entry(0, to=A, phase=LAPSED, mode=SHARED), (), (make.foreign(0),), True),
    "others' injector, no GPU": (make.entry(to=A, phase=LAPSED, mode=None), (), (make.foreign(0),), True),
}


@pytest.mark.parametrize(("late", "entries", "others", "may"), LATE.values(), ids=LATE)
def test_a_lapsed_container_may_start_while_nobody_has_its_gpus(
    late: Entry, entries: tuple[Entry, ...], others: tuple[ExternalAllocation, ...], may: bool
) -> None:
    assert make.ledger(late, *entries, others=others).may_start(A.id) is may


STOPS = {"running": (RUNNING, None), "created": (CREATED, LAPSED), "lapsed": (LAPSED, LAPSED)}


@pytest.mark.parametrize(("before", "then"), STOPS.values(), ids=STOPS)
def test_a_stop_ends_what_ran_and_only_lapses_what_may_still_start(before: GrantPhase, then: GrantPhase | None) -> None:
    stopped = after(make.ledger(make.entry(0, to=A, phase=before)), Stopped(7.0, A.id))
    assert not any(use.holders for use in stopped.usage().values())
    assert phases(stopped) == ({} if then is None else {A.id: then})


def test_a_sandbox_takes_all_its_containers_along_and_only_those() -> None:
    anew = make.container(of=make.pod("a", id=PodId("sandbox-a-2")), name="new")  # the same pod, its next sandbox
    ledger = make.ledger(
        make.entry(0, to=A), make.entry(0, to=A_SIDE, phase=LAPSED), make.entry(0, to=anew), make.entry(1, to=B)
    )
    assert set(after(ledger, PodGone(1.0, A.pod.id)).entries) == {anew.id, B.id}


def test_of_two_created_ones_the_first_listed_holds_because_nothing_tells_which_had_lapsed() -> None:
    one, two = make.entry(0, to=A, phase=CREATED), make.entry(0, to=B, phase=CREATED)
    assert phases(after(Ledger(), Synchronized(1.0, entries=(one, two)))) == {A.id: CREATED, B.id: LAPSED}
    assert phases(after(Ledger(), Synchronized(1.0, entries=(two, one)))) == {A.id: LAPSED, B.id: CREATED}


MORE: Final = 4  # times as many containers


def synchronized_s(count: int) -> float:
    """The CPU time of two Synchronize: half of the containers run, and the second list lacks one of these."""
    held = [
        make.entry(0, mode=SHARED, phase=RUNNING if number % 2 else CREATED, to=make.container(of=f"pod-{number}"))
        for number in range(count)
    ]
    ran = {each.grant.container_id: each for each in held if each.phase is RUNNING}
    processes = {id_: FirstProcess(1, 1, Cgroup("", f"/{id_}")) for id_ in ran}
    first = Synchronized(1.0, frozenset(each.grant.container_id for each in held), tuple(held), processes=processes)
    second = Synchronized(2.0, first.ids - {held[1].grant.container_id}, (held[0], *held[2:]), processes=processes)
    began = time.process_time()
    assert len(after(Ledger(), first, second).usage()[make.uuid(0)].grants) == count
    return time.process_time() - began


def test_one_that_is_looked_for_starts_beside_nobody_who_has_its_gpu_by_now() -> None:
    remembered = Entry(make.grant(0, to=A), CREATED, 5.0, 12.0, remembered=True)
    running = Entry(make.grant(0, to=B), RUNNING, 9.0)
    listed = Synchronized(10.0, frozenset({B.id}), (running,), (remembered,), unsought=frozenset({A.id}))
    looked_for = after(Ledger(), listed)
    assert phases(looked_for) == {A.id: CREATED, B.id: RUNNING}
    assert not looked_for.may_start(A.id)
    found_nowhere = after(looked_for, Sought(10.5, 10.0, frozenset({A.id})))
    assert phases(found_nowhere) == {A.id: LAPSED, B.id: RUNNING}
    assert not found_nowhere.may_start(A.id)


@pytest.mark.parametrize(("grace_s", "phase"), [(GRACE_S, LAPSED), (math.inf, CREATED)])
def test_where_no_refused_start_is_heeded_time_alone_frees_nothing(grace_s: float, phase: GrantPhase) -> None:
    """Also of what only the journal has: it may start without a word after the walk that looked for it."""
    remembered = Entry(make.grant(0, to=A), CREATED, 5.0, 12.0, remembered=True)
    listed = Synchronized(10.0, frozenset(), (), (remembered,))
    ledger = after(Ledger(), listed, Ticked(100.0), rules=replace(RULES, created_grace_s=grace_s))
    assert phases(ledger) == {A.id: phase}


def test_synchronize_takes_as_long_for_each_container_whatever_their_number() -> None:
    few = min(synchronized_s(500) for _ in range(3))
    assert min(synchronized_s(500 * MORE) for _ in range(3)) < few * MORE * 2
