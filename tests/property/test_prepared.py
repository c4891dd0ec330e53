"""Whatever NVIDIA's DRA driver prepared is nobody else's, from the kubelet's word until its pod is gone."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.reservations import SETTLED_S
from tests.support.builders import container, gpu, held_node, uuid
from tests.support.kubelet_nodes import ExternalNode, again

GPUS = 3
INDEX = st.integers(0, GPUS - 1)
DATA = st.data()


class BesideNvidiasDriver(RuleBasedStateMachine):
    """theirs: pods with a prepared GPU, and its index. local: what annotations got, by container."""

    def __init__(self) -> None:
        super().__init__()
        self.node = ExternalNode()
        self.node.put_gpus([gpu(index) for index in range(GPUS)])
        self.theirs: dict[str, int] = {}
        self.opening: dict[str, Container] = {}
        self.local: dict[ContainerId, tuple[Container, frozenset[GpuUuid]]] = {}
        self.number = 0

    def made(self, pod: str) -> Container:
        found = container(of=pod)
        return replace(found, pod=replace(found.pod, id=PodId(f"sandbox-{pod}")))

    @rule(index=INDEX)
    def prepare(self, index: int) -> None:
        """Of any GPU: that driver knows nothing of ours. Its pods may share one."""
        self.number += 1
        pod = f"theirs-{self.number}"
        self.theirs[pod] = index
        self.node.prepares(self.made(pod), f"gpu-{7 - index}")
        self.node.sandbox_created(self.made(pod))
        self.node.answer()

    @precondition(lambda self: self.theirs)
    @rule(data=DATA)
    def their_container(self, data: st.DataObject) -> None:
        """It comes, or comes again, with its node from the CDI specification."""
        pod = data.draw(st.sampled_from(sorted(self.theirs)))
        if old := self.opening.pop(pod, None):
            self.node.stop(old)
        self.number += 1
        opens = again(replace(self.made(pod), devices=(held_node(gpu(self.theirs[pod])),)), self.number)
        assert self.node.create(opens) == ()
        self.node.start(opens)
        self.opening[pod] = opens

    @precondition(lambda self: self.opening)
    @rule(data=DATA)
    def their_container_ends(self, data: st.DataObject) -> None:
        self.node.stop(self.opening.pop(data.draw(st.sampled_from(sorted(self.opening)))))

    @precondition(lambda self: self.theirs)
    @rule(data=DATA, told=st.booleans())
    def their_pod_ends(self, data: st.DataObject, told: bool) -> None:
        """told: by the runtime, too. The kubelet's list tells, after a while."""
        pod = data.draw(st.sampled_from(sorted(self.theirs)))
        if old := self.opening.pop(pod, None):
            self.node.stop(old)
        del self.theirs[pod]
        self.node.listed.pop(("ml", pod))
        if told:
            self.node.end_pod(self.made(pod))
        self.node.list_all()
        self.node.clock.now += SETTLED_S
        self.node.list_all()

    @precondition(lambda self: self.theirs)
    @rule(data=DATA)
    def their_sandbox_ends(self, data: st.DataObject) -> None:
        """The kubelet makes it anew, for the claim that is prepared."""
        pod = data.draw(st.sampled_from(sorted(self.theirs)))
        if old := self.opening.pop(pod, None):
            self.node.stop(old)
        self.node.end_pod(self.made(pod))

    @rule(claim=st.sampled_from(["1", "2", "all", "device=0"]))
    def create_by_annotation(self, claim: str) -> None:
        self.number += 1
        of = again(container(claim, of=f"local-{self.number}"), self.number)
        self.node.admitted(of, ())
        got = self.node.create(of)
        if isinstance(got, tuple) and got and self.node.start(of):
            assert self.prepared.isdisjoint(got)
            self.local[of.id] = of, frozenset(got)

    @precondition(lambda self: self.local)
    @rule(data=DATA)
    def local_ends(self, data: st.DataObject) -> None:
        of, _ = self.local.pop(data.draw(st.sampled_from(sorted(self.local))))
        self.node.pod_deleted(of)

    @rule(empty=st.booleans())
    def list(self, empty: bool) -> None:
        """empty: by a kubelet that has just started, and knows its pods a moment later."""
        known = self.node.listed
        if empty:
            self.node.listed = {}
            self.node.list_all()
            self.node.clock.now += SETTLED_S / 2
            self.node.listed = known
        self.node.list_all()

    @rule()
    def restart(self) -> None:
        """The next daemon has what ledger.json keeps of it."""
        prepared = self.node.plugin.ledger.prepared
        alive = [(of, True) for of, _ in self.local.values()] + [(of, True) for of in self.opening.values()]
        self.node.restart_daemon()
        self.node.node_state.ledger = Ledger(prepared=prepared)
        self.node.relist(alive)
        self.node.list_all()

    @property
    def prepared(self) -> set[GpuUuid]:
        return {uuid(index) for index in self.theirs.values()}

    @invariant()
    def what_is_prepared_is_held_and_nothing_else_is(self) -> None:
        held = self.prepared.union(*(uuids for _, uuids in self.local.values()))
        assert self.node.taken() == held

    @invariant()
    def each_holder_is_one(self) -> None:
        for use in self.node.plugin.ledger.usage().values():
            pods = [each.pod for each in use.external.values()]
            assert len(pods) == len(set(pods)), pods


TestBesideNvidiasDriver = BesideNvidiasDriver.TestCase
