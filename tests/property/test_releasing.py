"""Law: what a pod had exclusively goes to no other pod before a look finds it empty or the grace is over; then it does.

Beside the ledger a GPU is played whose processes outlive their containers for as long as they like.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Grant, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.apply import cleared_for
from nri_gpu.ledger.events import Created, LedgerEvent, Looked, PodGone, Removed, Started, Stopped, Ticked
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.policy.model import Policy
from tests.property import strategies
from tests.support import builders as make
from tests.support import ledgers
from tests.support.ledgers import after

GRACE_S: Final = 60.0
RULES: Final = replace(ledgers.RULES, created_grace_s=1e9)  # lapses are not the subject here
GPUS: Final = (*make.gpus(2), make.mig_gpu(2))
UNITS: Final = tuple(unit.uuid for unit in make.inventory(GPUS).units)
pods = st.sampled_from(strategies.POD_NAMES)
names = st.sampled_from(strategies.CONTAINER_NAMES)
units = st.sampled_from(UNITS)
claims = st.sampled_from(["1", "all", "device=0", "device=0,2:1", "device=1;mode=shared", "mig=1g.5gb"])


class Node(RuleBasedStateMachine):
    """processes: on each GPU, by the pod they are of; some outlive it. dirty: what others must not have yet."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.now, self.number = Ledger(), 0.0, 0
        self.node = make.node(GPUS)
        self.processes: dict[GpuUuid, list[str]] = {uuid: [] for uuid in UNITS}
        self.dirty: dict[GpuUuid, tuple[str, float]] = {}

    def gone(self, event: LedgerEvent) -> None:
        before, self.ledger = self.ledger, after(self.ledger, event, rules=RULES)
        for id_ in before.entries.keys() - self.ledger.entries.keys():
            entry = before.entries[id_]
            if entry.phase is GrantPhase.RUNNING and entry.grant.mode == "exclusive":
                self.dirty |= {uuid: (entry.grant.pod_uid, self.now) for uuid in entry.grant.uuids}

    @rule(pod=pods, name=names, claim=claims, runs=st.booleans())
    def create(self, pod: str, name: str, claim: str, runs: bool) -> None:
        self.number, self.now = self.number + 1, self.now + 0.5
        asks: Container = make.container(claim, of=pod, name=name, id=ContainerId(f"{pod}.{name}.{self.number}"))
        self.ledger = after(self.ledger, Ticked(self.now), rules=RULES)
        decision = decide(asks, self.node, cleared_for(self.ledger, asks, self.now), Policy())
        if isinstance(decision, Inject):
            self.ledger = after(self.ledger, Created(self.now, asks, decision.grant), rules=RULES)
            for uuid in decision.grant.uuids:
                owner, since = self.dirty.get(uuid, (asks.pod.uid, 0.0))
                assert owner == asks.pod.uid or self.now - since > GRACE_S
            if runs:
                self.starts(decision.grant)

    @rule(pick=st.integers(0, 99))
    def start(self, pick: int) -> None:
        self.now += 0.5
        if waiting := [each for each in self.ledger.entries.values() if each.phase is GrantPhase.CREATED]:
            self.starts(waiting[pick % len(waiting)].grant)

    def starts(self, grant: Grant) -> None:
        assert self.ledger.may_start(grant.container_id)
        self.ledger = after(self.ledger, Started(self.now, grant.container_id), rules=RULES)
        for uuid in grant.uuids:
            self.processes[uuid].append(grant.pod_uid)

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["stop", "remove", "pod"]), clean=st.booleans())
    def end(self, pick: int, how: str, clean: bool) -> None:
        self.now += 0.5
        if not (alive := list(self.ledger.entries.values())):
            return
        grant = alive[pick % len(alive)].grant
        events: dict[str, LedgerEvent] = {
            "stop": Stopped(self.now, grant.container_id),
            "remove": Removed(self.now, (grant.container_id,)),
            "pod": PodGone(self.now, grant.pod_id),
        }
        self.gone(events[how])
        if clean:
            for uuid in grant.uuids:
                self.processes[uuid] = [each for each in self.processes[uuid] if each != grant.pod_uid]

    @rule(change=st.sampled_from(["given", "removed", "pod gone"]))
    def others_give_a_gpu_or_take_it_back(self, change: str) -> None:
        other = make.foreign(1)
        match change:
            case "given":
                self.ledger = self.ledger.with_all_external({other.container_id: other})
            case "removed":
                self.gone(Removed(self.now, (other.container_id,)))
            case _:
                self.gone(PodGone(self.now, other.pod_id))

    @rule(uuid=units)
    def a_process_ends(self, uuid: GpuUuid) -> None:
        self.processes[uuid] = self.processes[uuid][1:]

    @rule(late=st.booleans())
    def a_look(self, late: bool) -> None:
        """late: it had begun before whatever happened last."""
        began = self.now - 0.5 if late else self.now + 0.25
        self.now += 0.5
        counts = {uuid: len(there) for uuid, there in self.processes.items()}
        self.ledger = after(self.ledger, Looked(began, counts), rules=RULES)
        for uuid, (_, since) in list(self.dirty.items()):
            if began > since and not counts[uuid]:
                del self.dirty[uuid]

    @rule()
    def the_grace_goes_by(self) -> None:
        self.now += GRACE_S + 1

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        assert not after(self.ledger, Ticked(self.now + GRACE_S + 1), rules=RULES).releasing

    @invariant()
    def what_nobody_looked_at_waits(self) -> None:
        fresh = {uuid for uuid, (_, since) in self.dirty.items() if self.now - since <= GRACE_S}
        assert fresh <= set(self.ledger.releasing)

    @invariant()
    def nothing_waits_that_is_known_to_be_empty(self) -> None:
        assert set(self.ledger.releasing) <= set(self.dirty)


TestHandover = Node.TestCase
TestHandover.settings = settings(max_examples=80, stateful_step_count=40)
