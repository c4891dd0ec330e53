"""Laws: no holder is let go while a process of it is there, whatever order requests, lists, walks and restarts come in.

Nor is a GPU of a container that a list lacks free before a whole walk that began after that list; whatever is lost or
unseen is looked at again; and a daemon that begins anew makes the same of a list as the daemon before it would.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Cgroup, Container, ContainerId, FirstProcess
from nri_gpu.domain.decision import Inject
from nri_gpu.ledger.apply import cleared_for
from nri_gpu.ledger.events import (
    Created,
    LedgerEvent,
    PodGone,
    ProcessesFound,
    Removed,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger
from nri_gpu.ledger.processes import ContainerProcesses, LookedAt, Means, Walked
from nri_gpu.policy.model import Policy
from nri_gpu.records.ledger_file import read_ledger, write_ledger
from tests.support import builders as make
from tests.support.ledgers import GRACE_S, RULES, after

ANSWER_S: Final = 2.0  # for how long the runtime waits for one
NODE: Final = make.node(make.gpus(1))
POLICY: Final = Policy.default()
numbers = st.integers(0, 2)  # of containers in the order in which they were granted the GPU, from the newest
some = st.sets(numbers)


def process(id_: ContainerId) -> FirstProcess:
    return FirstProcess(1, 1, Cgroup("", f"/{id_}"))


def holders(ledger: Ledger) -> dict[ContainerId, GrantPhase]:
    return {id_: each.phase for id_, each in ledger.entries.items() if each.holds}


class Node(RuleBasedStateMachine):
    """made: all that were granted the node's one GPU, with their grants and when. unsettled: those in the journal.

    tells: whether the runtime tells of each start, and heeds our refusal of one.
    living: those with a process. walk: when one began that goes on, for whom, and what it has found.
    """

    tells = True

    def __init__(self) -> None:
        super().__init__()
        self.means = Means(GRACE_S, tells=self.tells)
        self.ledger_rules = RULES if self.tells else replace(RULES, created_grace_s=math.inf)
        self.ledger, self.table, self.now = Ledger(), ContainerProcesses(), 0.0
        self.made: dict[ContainerId, tuple[Container, Entry]] = {}
        self.unsettled: set[ContainerId] = set()
        self.living: set[ContainerId] = set()
        self.untold: set[ContainerId] = set()  # that run, and were created by all that the ledger was told
        self.walk: tuple[float, frozenset[ContainerId], dict[ContainerId, FirstProcess]] | None = None
        self.unseen: dict[ContainerId, float] = {}  # since a list that lacks them, and no whole walk since then
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    def take(self, *events: LedgerEvent) -> None:
        self.ledger = after(self.ledger, *events, rules=self.ledger_rules)

    def chosen(self, those: Iterable[int]) -> list[ContainerId]:
        newest = list(reversed(self.made))
        return [newest[each] for each in those if each < len(newest)]

    @rule(pod=st.sampled_from("ab"))
    def ask(self, pod: str) -> None:
        """A pod asks for the GPU, maybe in its next attempt at a container."""
        self.now += 0.5
        id_ = ContainerId(f"container-{len(self.made)}")
        container = make.container("device=0", of=pod, id=id_)
        if not self.tells:  # the kubelet makes the next attempt once the last one is dead
            dead = self.untold & self.ledger.attempts(container.pod.uid, container.name).keys()
            self.untold, self.living = self.untold - dead, self.living - dead
            self.take(Removed(self.now, self.ledger.running_before(id_, container.pod.uid, container.name)))
        self.take(Ticked(self.now))
        decision = decide(container, NODE, cleared_for(self.ledger, container, self.now), POLICY)
        if isinstance(decision, Inject):
            self.take(Created(self.now, container, decision.grant))
            self.made[id_] = container, self.ledger.entries[id_]
            self.unsettled.add(id_)
        self.look()

    @rule(number=numbers, seen=st.booleans())
    def start(self, number: int, seen: bool) -> None:
        """Told by the runtime. seen: the process can be read."""
        self.now += 0.5
        for id_ in self.chosen([number]):
            entry = self.ledger.entries.get(id_)
            if entry and not entry.ran and self.ledger.may_start(id_):
                self.take(Started(self.now, id_), *([ProcessesFound(self.now, {id_: process(id_)})] if seen else []))
                self.unsettled.discard(id_)
                self.unseen.pop(id_, None)
                self.living.add(id_)

    @rule(number=numbers)
    def a_process_ends(self, number: int) -> None:
        self.living.difference_update(self.chosen([number]))

    @rule(listed=some, with_pid=st.booleans(), started=some, restart=st.booleans())
    def connect(self, listed: set[int], with_pid: bool, started: set[int], restart: bool) -> None:
        """The runtime lists some. started: of those that wait for it, the ones that did while there was no daemon."""
        self.now += 0.5
        held = self.ledger.entries.items()
        created = {id_ for id_, each in held if each.phase is GrantPhase.CREATED} & self.unsettled
        self.living |= created & set(self.chosen(started))
        there = set(self.chosen(listed)) & (self.living | created)
        entries = tuple(
            Entry(self.made[id_][1].grant, GrantPhase.RUNNING, self.now)
            if id_ in self.living
            else Entry(self.made[id_][1].grant, GrantPhase.CREATED, self.now, Lapse.NEVER)
            for id_ in sorted(there)
        )
        since = {id_: self.made[id_][1].since for id_ in sorted(self.unsettled)}
        deadlines = {
            id_: min(at + GRACE_S, self.now + ANSWER_S) for id_, at in since.items() if at >= self.now - GRACE_S
        }
        remembered = tuple(
            Entry(self.made[id_][1].grant, GrantPhase.CREATED, since[id_], until, remembered=True)
            for id_, until in deadlines.items()
        )
        processes = {id_: process(id_) for id_ in there & self.living if with_pid}
        ran = {id_ for id_, each in held if each.ran}
        holding = {id_ for id_, each in held if each.holds} | deadlines.keys()
        unsought = frozenset(ran | (holding - there)) - self.ledger.processes.keys() - processes.keys()
        event = Synchronized(self.now, frozenset(there), entries, remembered, processes=processes, unsought=unsought)
        file = Path(self.folder.name, "ledger.json")
        write_ledger(file, self.ledger)
        anew = after(read_ledger(file, self.now), event, rules=self.ledger_rules)
        self.take(event)
        assert holders(anew) == holders(self.ledger)
        assert (anew.processes, anew.unsought) == (self.ledger.processes, self.ledger.unsought)
        if restart:
            self.ledger, self.table, self.walk = anew, ContainerProcesses(), None
        self.unseen = dict.fromkeys(unsought & self.ledger.entries.keys(), self.now)

    @rule(number=numbers, what=st.sampled_from(["stopped", "removed", "pod gone"]))
    def the_runtime_says_that_it_is_over(self, number: int, what: str) -> None:
        self.now += 0.5
        for id_ in self.chosen([number]):
            pod = self.made[id_][0].pod.id
            self.untold -= {each for each in self.untold if self.made[each][0].pod.id == pod}
            events: dict[str, LedgerEvent] = {
                "stopped": Stopped(self.now, id_),
                "removed": Removed(self.now, (id_,)),
                "pod gone": PodGone(self.now, pod),
            }
            self.take(events[what])

    @rule(wait_s=st.sampled_from([1.0, ANSWER_S + 1, GRACE_S + 1]))
    def time_goes_by(self, wait_s: float) -> None:
        self.now += wait_s
        self.take(*self.table.overdue(self.now, self.ledger), Ticked(self.now))
        self.look()

    def look(self) -> bool:
        """Look at what is due. Return whether there is anything."""
        found = self.table.next(self.now, self.ledger, self.means)
        if found.walk:
            assert self.walk is None
            self.walk = self.now, found.walk, {id_: process(id_) for id_ in found.walk & self.living}
        if found.look_at:
            looked = LookedAt(found.look_at, found.look_at - self.living)
            self.take(*self.table.saw(self.now, looked, self.ledger, self.means))
        return bool(found.walk or found.look_at)

    @precondition(lambda self: self.walk)
    @rule(whole=st.booleans())
    def the_walk_ends(self, whole: bool) -> None:
        assert self.walk
        (began, sought, found), self.walk = self.walk, None
        self.now += 0.5
        if not self.tells:  # what starts behind the walk looks the same a moment later
            found = {id_: process(id_) for id_ in sought & self.living}
        if not whole:
            found = {}
        self.take(*self.table.saw(self.now, Walked(found, whole), self.ledger, self.means))
        seen = sought if whole else set(found)
        self.unseen = {id_: at for id_, at in self.unseen.items() if id_ not in seen or at > began}
        self.unseen = {id_: at for id_, at in self.unseen.items() if id_ not in found}

    @invariant()
    def who_may_have_a_process_holds(self) -> None:
        for id_ in self.unseen.keys() | (self.living & (self.ledger.processes.keys() | self.untold)):
            assert self.ledger.entries[id_].holds

    @invariant()
    def what_is_lost_or_unseen_is_looked_at_again(self) -> None:
        if self.ledger.lost or self.ledger.unsought:
            due = self.table.due(self.now, self.ledger, self.means)
            if due is None and not self.walk:
                assert self.look()

    @invariant()
    def the_unseen_are_the_ledgers(self) -> None:
        assert set(self.ledger.unsought) == {id_ for id_ in self.unseen if id_ in self.ledger.entries}


class HeedlessNode(Node):
    """A node whose runtime heeds no refused start, and starts restored containers without a word."""

    tells = False

    @rule(number=numbers, whole=st.booleans())
    def start_untold(self, number: int, whole: bool) -> None:
        """Maybe at the end of a walk."""
        for id_ in self.chosen([number]):
            entry = self.ledger.entries.get(id_)
            if entry and entry.phase is GrantPhase.CREATED:
                self.living.add(id_)
                self.untold.add(id_)
        if self.walk:
            self.the_walk_ends(whole)


TestProcessTable = Node.TestCase
TestProcessTable.settings = settings(max_examples=200, stateful_step_count=30)
TestProcessTableOfHeedlessRuntime = HeedlessNode.TestCase
TestProcessTableOfHeedlessRuntime.settings = TestProcessTable.settings
