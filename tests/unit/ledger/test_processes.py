"""The table of processes: whose exits it waits for, and what the ledger hears of what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from nri_gpu.domain.container import TOLD_WITHIN_S, Cgroup, ContainerId, FirstProcess
from nri_gpu.ledger.events import Created, LedgerEvent, ProcessesFound, Removed, Started, Stopped, Synchronized
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.processes import (
    WALK_PAUSE_S,
    WATCHED_MAX,
    Began,
    ContainerProcesses,
    Exited,
    ListedPids,
    Means,
    Observation,
    Told,
    Walked,
)
from tests.support import builders as make
from tests.support.ledgers import GRACE_S, after

ONE, TWO, THREE = map(ContainerId, ("one", "two", "three"))
PID: Final = 7
MEANS: Final = Means(GRACE_S)


def listed(pids: Mapping[ContainerId, int]) -> ListedPids:
    return ListedPids(frozenset(pids), pids)


class Looking:
    """A table, beside a ledger with containers that run with GPU 0, at a time that is set by hand."""

    def __init__(self, *ids: ContainerId) -> None:
        self.table, self.ledger, self.now = ContainerProcesses(), Ledger(), 1000.0
        for id_ in ids:
            made = make.container(of=f"pod-{id_}", id=id_)
            self.take(Created(self.now, made, make.grant(0, to=made)), Started(self.now, id_))

    def take(self, *events: LedgerEvent) -> None:
        self.ledger = after(self.ledger, *events)

    def saw(self, *observations: Observation) -> None:
        for each in observations:
            self.take(*self.table.saw(self.now, each, self.ledger, MEANS))

    def ended_after(self, seconds: float) -> list[ContainerId]:
        """Whose end the ledger hears of then."""
        self.now += seconds
        events = self.table.overdue(self.now, self.ledger)
        return [each.container_id for each in events if isinstance(each, Stopped)]

    def watched(self) -> dict[ContainerId, int]:
        return dict(self.table.next(self.now, self.ledger, MEANS).exits)

    def walk(self) -> frozenset[ContainerId]:
        """Whose cgroups a walk that begins now looks for."""
        return self.table.next(self.now, self.ledger, MEANS).walk


# --- exits ------------------------------------------------------------------------------------------------------------


def test_an_end_is_told_once_the_runtime_had_its_time_to_tell() -> None:
    looking = Looking(ONE)
    looking.saw(Began(ONE, PID))
    assert looking.watched() == {ONE: PID}
    looking.saw(Exited(ONE, PID))
    assert looking.ended_after(TOLD_WITHIN_S * 0.9) == []
    assert looking.ended_after(TOLD_WITHIN_S * 0.1) == [ONE]
    assert looking.ended_after(TOLD_WITHIN_S * 2) == []


@pytest.mark.parametrize(
    "seen",
    [
        (Told(ONE), Exited(ONE, PID)),
        (Exited(ONE, PID), Told(ONE)),
        (Began(ONE, PID + 1), Exited(ONE, PID)),  # run again by the same id, and its first end is seen late
        (Exited(ONE, PID), Began(ONE, PID + 1)),
        (Exited(ONE, PID), listed({})),
    ],
)
def test_of_one_that_the_runtime_tells_of_no_end_is_told(seen: tuple[Observation, ...]) -> None:
    looking = Looking(ONE)
    looking.saw(Began(ONE, PID), *seen)
    assert looking.ended_after(TOLD_WITHIN_S * 2) == []


def test_one_listed_without_a_pid_is_over_if_its_end_was_seen() -> None:
    """As containerd lists one whose task it just lost."""
    looking = Looking(ONE, TWO)
    looking.saw(Began(ONE, PID), Began(TWO, PID), Exited(ONE, PID))
    for _ in range(2):
        looking.saw(listed({ONE: 0, TWO: 0}), Began(ONE, 0), Began(TWO, 0))
        assert looking.table.unsure == set()
        assert looking.watched() == {TWO: PID}
        assert looking.ended_after(TOLD_WITHIN_S) == [ONE]


def test_one_that_was_never_seen_and_has_no_pid_is_unsure_once() -> None:
    looking = Looking(ONE, TWO, THREE)
    looking.saw(Began(THREE, PID), listed({ONE: 0, TWO: PID, THREE: 0}))
    assert looking.table.unsure == {ONE}
    looking.saw(listed({ONE: 0, TWO: 0, THREE: 0}))
    assert looking.table.unsure == {TWO}
    looking.saw(Told(TWO))
    assert looking.table.unsure == set()
    for pids in ({ONE: 0}, {TWO: PID}, {ONE: 0}):
        looking.saw(listed(pids))
    assert looking.table.unsure == {ONE}


def test_not_all_descriptors_go_there_and_none_stays_with_what_holds_nothing() -> None:
    ids = [ContainerId(str(number)) for number in range(WATCHED_MAX + 2)]
    looking = Looking(ids[0])
    looking.ledger = Ledger(dict.fromkeys(ids, looking.ledger.entries[ids[0]]))
    looking.saw(*(Began(each, PID) for each in ids))
    assert looking.watched().keys() == set(ids[:WATCHED_MAX])
    looking.take(Removed(looking.now, (ids[0],)))
    looking.watched()
    looking.saw(Began(ids[-1], PID))
    assert looking.watched().keys() == {*ids[1:WATCHED_MAX], ids[-1]}


# --- the walk ---------------------------------------------------------------------------------------------------------


def unlisted(*ids: ContainerId) -> Looking:
    """These ran, and a list lacks them."""
    looking = Looking(*ids)
    looking.take(Synchronized(looking.now, frozenset(), unsought=frozenset(ids)))
    return looking


def test_a_walk_tells_nothing_of_a_list_that_came_meanwhile_though_the_clock_stands() -> None:
    looking = unlisted(ONE)
    assert looking.walk() == {ONE}
    looking.take(Synchronized(looking.now, frozenset(), unsought=frozenset({ONE})))
    looking.saw(listed({}), Walked())
    looking.now += WALK_PAUSE_S
    assert looking.ledger.lost.keys() == looking.walk() == {ONE}
    looking.saw(Walked())
    assert not looking.ledger.entries


def test_a_walk_tells_nothing_of_one_whose_process_the_runtime_named_meanwhile() -> None:
    """What it finds may be a cgroup of another runtime's container by that name."""
    looking = unlisted(ONE, TWO)
    assert looking.walk() == {ONE, TWO}
    own, foreign = (FirstProcess(0, 0, Cgroup("", f"/{where}/one")) for where in ("own", "foreign"))
    looking.take(Started(looking.now, ONE), ProcessesFound(looking.now, {ONE: own}))
    looking.saw(Walked({ONE: foreign}))
    assert looking.ledger.processes == {ONE: own}
    assert looking.ledger.entries.keys() == {ONE}


def test_a_whole_walk_ends_nobody_whom_the_runtime_lists() -> None:
    """Its cgroup may have another name."""
    looking = Looking(ONE)
    entries = tuple(looking.ledger.entries.values())
    looking.take(Synchronized(looking.now, frozenset({ONE}), entries, unsought=frozenset({ONE})))
    assert looking.walk() == {ONE}
    looking.saw(Walked())
    assert looking.ledger.entries.keys() == {ONE}
    assert not looking.ledger.unsought
