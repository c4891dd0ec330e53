"""Law: whoever runs holds its GPU, and nobody beside it, in whatever order a runtime tells of starts and stops.

A runtime that is asked to stop a container in the middle of its start tells of that, and starts it all the same. Before
that or after, it tells that the container runs. A start that fails is told by a stop and nothing else. A program that
ends at once may be told to be over before it is told to run.
"""

from __future__ import annotations

from typing import Final, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu.domain.container import Container, ContainerId, FirstProcess
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.apply import apply, cleared_for
from nri_gpu.ledger.entries import STARTS_S
from nri_gpu.ledger.events import (
    Created,
    Gone,
    LedgerEvent,
    PodGone,
    PostStarted,
    ProcessesFound,
    Removed,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.holders import UNUSED
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import RULES

State = Literal["created", "starting", "running", "over"]
GPU: Final = make.uuid(0)
NAMES: Final = ("one", "two")
names = st.sampled_from(NAMES)
waits = st.sampled_from([STARTS_S / 2, STARTS_S, RULES.created_grace_s + 1])


class Starts(RuleBasedStateMachine):
    """Containers as they really are, which want one GPU: the newest of each of two pods.

    untold: what the runtime still has to tell of them, in any order. seen: those with a process that can be looked at.
    given_up_at: when a start that was to be stopped, and whose process cannot be looked at, is over for the ledger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.now, self.number = Ledger(), 0.0, 0
        self.made: dict[str, Container] = {}
        self.state: dict[ContainerId, State] = {}
        self.untold: dict[ContainerId, list[LedgerEvent]] = {}
        self.seen: set[ContainerId] = set()
        self.given_up_at: dict[ContainerId, float] = {}

    def tell(self, event: LedgerEvent) -> None:
        self.ledger = apply(self.ledger, replace(event, at=self.now), replace(RULES, waits=False))

    def all_in(self, *states: State) -> list[Container]:
        return [made for made in self.made.values() if self.state[made.id] in states]

    def of(self, name: str, *states: State) -> Container:
        """That pod's container if it is in such a state, else the other's."""
        found = self.all_in(*states)
        return next((made for made in found if made.pod.name == name), found[0])

    @precondition(lambda self: len(self.all_in("created", "starting", "running")) < len(NAMES))
    @rule(name=names)
    def create(self, name: str) -> None:
        self.number += 1
        container = make.container(of=name, id=ContainerId(f"{name}.{self.number}"))
        if name in self.made and self.state[self.made[name].id] != "over":
            return
        self.tell(Ticked(self.now))
        usage = cleared_for(self.ledger, container, self.now).usage()
        if not usage.get(GPU, UNUSED).blocks(Mode.EXCLUSIVE, container.pod.uid):
            self.made[name], self.state[container.id], self.untold[container.id] = container, "created", []
            self.tell(Created(self.now, container, make.grant(0, to=container)))

    @precondition(lambda self: self.all_in("created"))
    @rule(name=names, seen=st.booleans())
    def start(self, name: str, seen: bool) -> None:
        id_ = self.of(name, "created").id
        self.hear_all(id_)
        if self.ledger.may_start(id_):
            self.state[id_] = "starting"
            self.given_up_at.pop(id_, None)
            self.tell(Started(self.now, id_))
            if seen:
                self.seen.add(id_)
                self.tell(ProcessesFound(self.now, {id_: FirstProcess(self.number, 1)}))

    @precondition(lambda self: self.all_in("created", "starting"))
    @rule(name=names)
    def stop_it_before_it_runs(self, name: str) -> None:
        id_ = self.of(name, "created", "starting").id
        self.untold[id_].append(Stopped(self.now, id_, unstarted=True))

    @precondition(lambda self: self.all_in("starting"))
    @rule(name=names)
    def succeed(self, name: str) -> None:
        id_ = self.of(name, "starting").id
        if id_ in self.seen or self.now < self.given_up_at.get(id_, self.now + 1):
            self.state[id_] = "running"
            self.untold[id_].append(PostStarted(self.now, id_))

    @precondition(lambda self: self.all_in("starting"))
    @rule(name=names)
    def fail(self, name: str) -> None:
        id_ = self.of(name, "starting").id
        self.state[id_] = "over"
        self.untold[id_].append(Stopped(self.now, id_, unstarted=True))

    @precondition(lambda self: self.all_in("running"))
    @rule(name=names)
    def end(self, name: str) -> None:
        id_ = self.of(name, "running").id
        self.state[id_] = "over"
        self.untold[id_].append(Stopped(self.now, id_))

    @precondition(lambda self: self.all_in("created", "running", "over"))
    @rule(name=names, with_pod=st.booleans())
    def remove(self, name: str, with_pod: bool) -> None:
        made = self.of(name, "created", "running", "over")
        self.hear_all(made.id)
        self.state[made.id] = "over"
        self.tell(PodGone(self.now, made.pod.id) if with_pod else Removed(self.now, (made.id,)))

    @precondition(lambda self: any(self.untold.values()))
    @rule(pick=st.integers(0, 9))
    def hear(self, pick: int) -> None:
        waiting = [(id_, at) for id_, events in self.untold.items() for at in range(len(events))]
        self.hear_one(*waiting[pick % len(waiting)])

    def hear_one(self, id_: ContainerId, at: int = 0) -> None:
        event = self.untold[id_].pop(at)
        if isinstance(event, Stopped) and event.unstarted:
            self.given_up_at.setdefault(id_, self.now + STARTS_S)
        self.tell(event)

    def hear_all(self, id_: ContainerId) -> None:
        while self.untold[id_]:
            self.hear_one(id_)

    @rule(wait_s=waits)
    def wait(self, wait_s: float) -> None:
        for id_ in self.untold:
            self.hear_all(id_)
        self.now += wait_s
        self.tell(Ticked(self.now))

    @rule()
    def look_for_processes(self) -> None:
        self.tell(Gone(self.now, tuple(id_ for id_ in self.ledger.lost if self.state[id_] == "over")))

    @precondition(lambda self: "starting" not in self.state.values())  # an event that a new connection does not get
    @rule()
    def synchronize(self) -> None:
        here = {made.id: made for made in self.made.values() if self.state[made.id] != "over"}
        listed = [self.listed(made) for made in here.values() if made.id in self.ledger.entries]
        processes = {id_: self.ledger.processes[id_] for id_ in here if id_ in self.ledger.processes}
        self.tell(Synchronized(self.now, frozenset(here), tuple(listed), processes=processes))

    def listed(self, made: Container) -> Entry:
        running = self.state[made.id] == "running"
        phase, until = (GrantPhase.RUNNING, Lapse.AFTER_GRACE) if running else (GrantPhase.CREATED, Lapse.NEVER)
        return Entry(make.grant(0, to=made), phase, self.now, until)

    @invariant()
    def nobody_is_over_capacity(self) -> None:
        assert not strategies.capacity_faults(self.ledger)

    @invariant()
    def whoever_runs_holds_and_is_not_lost(self) -> None:
        for id_ in (id_ for id_, state in self.state.items() if state == "running" and not self.untold[id_]):
            assert self.ledger.entries[id_].phase is GrantPhase.RUNNING

    @invariant()
    def what_is_over_holds_no_longer_than_a_start_may_last(self) -> None:
        for id_ in (id_ for id_, state in self.state.items() if state == "over" and not self.untold[id_]):
            entry = self.ledger.entries.get(id_)
            if entry and entry.holds and not entry.lost:
                assert self.now < self.given_up_at[id_]


TestStarts = Starts.TestCase
TestStarts.settings = settings(max_examples=200, stateful_step_count=40)
