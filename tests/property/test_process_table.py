"""Laws: no holder is let go while a process of it is there, whatever order lists, walks and restarts come in.

Nor is a GPU of a container that a list lacks free before a whole walk that began after that list; and whatever is lost
or unseen is looked at again.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.events import Created, LedgerEvent, Removed, Started, Stopped, Synchronized, Ticked
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.ledger.processes import ContainerProcesses, LookedAt, Means, Walked
from tests.support import builders as make
from tests.support.ledgers import GRACE_S, after

IDS: Final = tuple(ContainerId(f"one{number}") for number in range(3))
GPUS: Final = make.gpus(3)
MEANS: Final = Means(GRACE_S)
ids = st.sampled_from(IDS)


class Node(RuleBasedStateMachine):
    """living: the containers with a process, each with a GPU of its own. walk: what a walk that goes on has found."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.table, self.now = Ledger(), ContainerProcesses(), 0.0
        self.living: set[ContainerId] = set()
        self.walk: tuple[float, frozenset[ContainerId], dict[ContainerId, FirstProcess]] | None = None
        self.unseen: dict[ContainerId, float] = {}  # since a list that lacks them, and no whole walk since then

    def take(self, *events: LedgerEvent) -> None:
        self.ledger = after(self.ledger, *events)

    def process(self, id_: ContainerId) -> FirstProcess:
        return FirstProcess(1, 1, Cgroup("", f"/{id_}"))

    @rule(id_=ids)
    def run(self, id_: ContainerId) -> None:
        """Told by the runtime; the process cannot be read."""
        self.now += 0.5
        if id_ in self.ledger.entries or id_ in self.living:
            return
        made = make.container("1", of=f"pod-{id_}", id=id_)
        self.take(Created(self.now, made, make.grant(IDS.index(id_), to=made)), Started(self.now, id_))
        self.living.add(id_)

    @rule(id_=ids)
    def a_process_ends(self, id_: ContainerId) -> None:
        self.living.discard(id_)

    @rule(listed=st.sets(ids), restart=st.booleans())
    def connect(self, listed: set[ContainerId], restart: bool) -> None:
        """The runtime lists some that run, without their PIDs. restart: of the daemon, which reads its file."""
        self.now += 0.5
        if restart:
            written = {
                id_: replace(each, phase=GrantPhase.RUNNING) if id_ in self.ledger.unsought else each
                for id_, each in self.ledger.entries.items()
            }
            self.ledger = Ledger(written, processes=self.ledger.processes)
            self.table, self.walk = ContainerProcesses(), None
        there = {id_: self.ledger.entries[id_] for id_ in listed & self.living & self.ledger.entries.keys()}
        entries = tuple(Entry(each.grant, GrantPhase.RUNNING, self.now) for each in there.values())
        unsought = frozenset(self.ledger.entries) - self.ledger.processes.keys()
        self.take(Synchronized(self.now, frozenset(there), entries, unsought=unsought))
        self.unseen = dict.fromkeys(unsought, self.now)

    @rule(id_=ids, removed=st.booleans())
    def the_runtime_says_that_it_is_over(self, id_: ContainerId, removed: bool) -> None:
        self.now += 0.5
        if id_ in self.unseen or id_ in self.ledger.processes:
            self.take(Removed(self.now, (id_,)) if removed else Stopped(self.now, id_))

    @rule(wait_s=st.sampled_from([0.1, 1.0, GRACE_S + 1]))
    def time_goes_by(self, wait_s: float) -> None:
        self.now += wait_s
        self.take(*self.table.overdue(self.now, self.ledger), Ticked(self.now))
        found = self.table.next(self.now, self.ledger, MEANS)
        if found.walk:
            assert self.walk is None
            self.walk = self.now, found.walk, {id_: self.process(id_) for id_ in found.walk & self.living}
        if found.look_at:
            looked = LookedAt(found.look_at, found.look_at - self.living)
            self.take(*self.table.saw(self.now, looked, self.ledger, MEANS))

    @precondition(lambda self: self.walk)
    @rule(whole=st.booleans())
    def the_walk_ends(self, whole: bool) -> None:
        assert self.walk
        (began, sought, found), self.walk = self.walk, None
        self.now += 0.5
        if not whole:
            found = {}
        self.take(*self.table.saw(self.now, Walked(found, whole), self.ledger, MEANS))
        seen = sought if whole else set(found)
        self.unseen = {id_: at for id_, at in self.unseen.items() if id_ not in seen or at > began}
        self.unseen = {id_: at for id_, at in self.unseen.items() if id_ not in found}

    @invariant()
    def who_may_have_a_process_holds(self) -> None:
        usage = self.ledger.usage()
        for id_ in self.unseen.keys() | (self.living & self.ledger.processes.keys()):
            assert GpuUuid(GPUS[IDS.index(id_)].uuid) in usage

    @invariant()
    def what_is_lost_or_unseen_is_looked_at_again(self) -> None:
        if self.ledger.lost or self.ledger.unsought:
            due = self.table.due(self.now, self.ledger, MEANS)
            found = self.table.next(self.now, self.ledger, MEANS) if due is None and not self.walk else None
            assert due is not None or self.walk or (found and (found.look_at or found.walk))
            if found and found.walk:
                self.walk = self.now, found.walk, {id_: self.process(id_) for id_ in found.walk & self.living}

    @invariant()
    def the_unseen_are_the_ledgers(self) -> None:
        assert set(self.ledger.unsought) == {id_ for id_ in self.unseen if id_ in self.ledger.entries}


TestProcessTable = Node.TestCase
TestProcessTable.settings = settings(max_examples=100, stateful_step_count=30)
