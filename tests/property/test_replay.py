"""What an audit log recorded is decided again to the byte, and leads to the same ledger, whatever happened."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Cgroup, Container, ContainerId, DeviceRef, FirstProcess, Pod, PodId, PodUid
from nri_gpu.domain.decision import Inject, Refuse
from nri_gpu.domain.node import Node
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.domain.value import encode
from nri_gpu.ledger.apply import apply, cleared_for
from nri_gpu.ledger.events import (
    ClaimPrepared,
    ClaimReleased,
    Created,
    Gone,
    LedgerEvent,
    Looked,
    PodGone,
    Sought,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit_limits import RECORD_MAX, cut_record, left_out_record
from nri_gpu.records.audit_records import (
    Compared,
    DecisionRecord,
    NodeRecord,
    PolicyRecord,
    Record,
    Replay,
    changed_record,
    container_of,
    decision_record,
    ledger_record,
    processes_of_created,
)
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import RULES

Step = Container | PreparedClaim | Node | Policy | Ledger | str
steps = st.lists(
    st.one_of(
        strategies.containers(),
        strategies.containers(),
        strategies.of_claims,
        strategies.prepared_claims,
        strategies.nodes,
        strategies.policies,
        strategies.ledgers,
        st.sampled_from(["start", "stop", "remove", "pod gone", "wait", "look", "list", "find", "find none"]),
    ),
    max_size=8,
)


class Recorder:
    """A plugin's part, in small: it decides, commits, and writes down what it did."""

    def __init__(self) -> None:
        self.records: list[Struct | Record] = [NodeRecord(node=encode(make.node())), PolicyRecord("0", "")]
        self.policies: list[Policy] = [Policy.default()]
        self.node, self.ledger, self.now = make.node(), Ledger(), 100.0
        self.rules = RULES
        self.last: Container | None = None

    def take(self, step: Step) -> None:
        self.now += 7
        match step:
            case Container():
                self._decide(step)
            case PreparedClaim():
                again = step.uid in self.ledger.claims
                self._apply(ClaimReleased(self.now, step.uid) if again else ClaimPrepared(self.now, step))
            case Node():
                self.node = step
                self.records.append(NodeRecord(node=encode(step)))
            case Ledger():
                self.ledger = step
                self.records.append(ledger_record(step, 0.0))
            case str():
                self._happen(step)
            case _:
                self.policies.append(step)
                self.records.append(PolicyRecord(str(len(self.policies) - 1), "", step.fault))

    def _decide(self, container: Container) -> None:
        self.last, policy = container, self.policies[-1]
        grace_s = (policy if not policy.fault else Policy()).ledger.created_grace_s
        self.rules = replace(RULES, created_grace_s=grace_s)
        self._apply(Ticked(self.now))
        decision = decide(container, self.node, cleared_for(self.ledger, container, self.now), policy)
        self.records.append(decision_record(container, decision, 1e9 + self.now, self.now))
        if not isinstance(decision, Refuse):
            self._apply(Created(self.now, container, decision.grant if isinstance(decision, Inject) else None))

    def _happen(self, event: str) -> None:
        if event == "wait":
            self.now += 1000
        elif event == "look":
            processes = {uuid: number % 3 for number, uuid in enumerate(self.ledger.releasing)}
            self._apply(Looked(self.now, processes))
        elif event == "list":  # lacks all; of those that were created, only the journal tells
            created = [each for each in self.ledger.entries.values() if each.phase is GrantPhase.CREATED]
            remembered = tuple(Entry(each.grant, each.phase, each.since, self.now, remembered=True) for each in created)
            unsought = frozenset(each.grant.container_id for each in remembered)
            self._apply(Synchronized(self.now, frozenset(), remembered=remembered, unsought=unsought))
        elif event in ("find", "find none"):
            sought = frozenset(self.ledger.unsought)
            found = {id_: FirstProcess(0, 0, Cgroup("", f"/{id_}")) for id_ in sought if event == "find"}
            self._apply(Sought(self.now, self.now, sought, found))
        elif self.last:
            of, now = self.last, self.now
            happened: dict[str, LedgerEvent] = {
                "start": Started(now, of.id),
                "stop": Stopped(now, of.id),
                "remove": Gone(now, (of.id,)),
                "pod gone": PodGone(now, of.pod.id),
            }
            if event != "start" or self.ledger.may_start(of.id):
                self._apply(happened[event])

    def _apply(self, event: LedgerEvent) -> None:
        before, self.ledger = self.ledger, apply(self.ledger, event, self.rules)
        changed = changed_record(before, self.ledger, 0.0)
        if changed:
            self.records.append(changed)

    @property
    def recorded(self) -> Ledger:
        """The ledger without what no decision needs."""
        return replace(self.ledger, starting={}, processes=processes_of_created(self.ledger))

    def compared(self, replay: Replay) -> Iterator[Compared]:
        for record in self.records:
            if isinstance(found := replay.take(json.loads(json.dumps(to_builtins(record)))), Compared):
                yield found


@given(steps)
def test_unchanged_it_is_identical(story: list[Step]) -> None:
    recorder = Recorder()
    for step in story:
        recorder.take(step)
    replay = Replay(lambda name, _: recorder.policies[int(name)])
    for compared in recorder.compared(replay):
        assert compared.recorded == compared.now
    assert replay.ledger == recorder.recorded


@given(steps, st.data())
def test_decisions_that_are_cut_or_left_out_change_no_other(story: list[Step], data: st.DataObject) -> None:
    recorder = Recorder()
    for step in story:
        recorder.take(step)
    for place, record in enumerate(recorder.records):
        if isinstance(record, DecisionRecord):
            of = container_of(record.container)
            instead = cut_record(of, record.answer, record.at_s, 40_000), left_out_record(of.pod, record.at_s, 1)
            recorder.records[place] = data.draw(st.sampled_from([record, *instead]))
    replay = Replay(lambda name, _: recorder.policies[int(name)])
    for compared in recorder.compared(replay):
        assert compared.recorded == compared.now
    assert replay.ledger == recorder.recorded


letters = st.text(min_size=1, max_size=3)


@given(letters, letters, st.sampled_from([(1, 1), (1, 5000), (100_000, 1), (300, 300)]), st.booleans())
def test_a_record_that_is_cut_is_small(text: str, name: str, shape: tuple[int, int], ours: bool) -> None:
    """Whatever a pod's author, or the runtime, may write in any of a container's fields."""
    length, size = shape
    text, name = text * length, name * length
    many = {f"{number}{name}": text for number in range(size)} | ({"gpu.nri.io": text} if ours else {})
    pod = Pod(id=PodId(name), uid=PodUid(name), name=name, namespace=name, annotations=many, labels=many)
    hostile = Container(
        id=ContainerId(name),
        name=name,
        pod=replace(pod, runtime_handler=text, cgroup_parent=text),
        annotations=many,
        env=many,
        env_twice=frozenset(many),
        devices=tuple(DeviceRef(path, 1, 2) for path in many),
        mounts=frozenset(many),
        cdi_devices=tuple(many),
        rlimits=frozenset(many),
        mps_folder=text,
        markers=many,
    )
    decision = decide(hostile, make.node(), Ledger(), Policy.default())
    cut = cut_record(hostile, decision_record(hostile, decision, 1e9, 1e9).answer, 1e9, 10**9)
    for record in (cut, left_out_record(hostile.pod, 1e9, 10**9)):
        line = json.dumps(to_builtins(record))
        assert len(line) <= RECORD_MAX
        assert Replay(lambda *_: Policy.default()).take(json.loads(line))


@given(steps, strategies.good_policies)
def test_by_another_policy_it_never_grants_twice(story: list[Step], other: Policy) -> None:
    """Made-up ledgers aside: what the replay grants by itself is never over capacity."""
    recorder = Recorder()
    for step in story:
        if not isinstance(step, Ledger):
            recorder.take(step)
    replay = Replay(lambda name, _: recorder.policies[int(name)], other)
    for _ in recorder.compared(replay):
        assert not strategies.capacity_faults(replay.ledger)
