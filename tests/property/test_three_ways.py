"""One ledger behind three ways: annotation, device plugin and claim never give one exclusive GPU to two parties.

Whatever is prepared, unprepared, created, started, stopped and restarted in whatever order; a claim is one party, from
prepare to unprepare, and its containers are of it for as long as they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.container import Container, ContainerId, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, PreparedClaim, device_name
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Policy
from tests.property.test_kubelet import Held, OneLedger
from tests.support.builders import container
from tests.support.claim_nodes import ClaimNode, with_claims

TEXTS: Final = st.sampled_from(["", "", "", "mode=shared", "capabilities=utility"])


class ThreeWays(OneLedger):
    """of_claim: by which claim each container was created. asked: each claim as the API server has it."""

    def __init__(self) -> None:
        super().__init__()
        self.of_claim: dict[ContainerId, PreparedClaim] = {}
        self.asked: dict[ClaimUid, AllocatedClaim] = {}

    def made_node(self, policy: Policy, settings: KubeletSettings) -> ClaimNode:
        self.claims = ClaimNode(policy, settings)
        return self.claims

    @property
    def prepared(self) -> dict[ClaimUid, PreparedClaim]:
        return dict(self.plugin_node.plugin.ledger.claims)

    @precondition(lambda self: self.plugin_node.devices.connected)
    @rule(data=st.data(), text=TEXTS, admin=st.sampled_from([False, False, True]), start=st.booleans())
    def prepare(self, data: Any, text: str, admin: bool, start: bool) -> None:  # noqa: ANN401 - hypothesis'
        """A claim that the scheduler made of what it thinks is free, which may be anything; then a container of it."""
        self.number += 1
        names = sorted(device_name(each) for each in self.plugin_node.node.inventory.units)
        devices = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        name = f"claim-{self.number}"
        uid, pod = ClaimUid(name), f"{name}-pod-0"
        results = tuple(
            AllocatedResult(request="gpu", pool="node", device=each, text=text, admin=admin) for each in devices
        )
        pods = {PodUid(f"uid-{pod}"): pod}
        asked = AllocatedClaim(uid=uid, namespace="ml", name=name, pods=pods, results=results)
        found = self.claims.prepare(asked)
        if isinstance(found, PreparedClaim):
            self.asked[uid] = asked
            assert self.claims.prepare(asked) == found
            if start:
                self.started(self.made_of(found, pod, "main"))

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def one_more_pod(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """It comes to a claim that is prepared; its first container has to wait until the claim is read again."""
        uid = data.draw(st.sampled_from(sorted(self.prepared)))
        claim, pod = self.prepared[uid], f"{uid}-pod-{len(self.prepared[uid].pods)}"
        if not self.plugin_node.devices.connected:
            return
        assert isinstance(self.claims.create(with_claims(container(of=pod), claim)), str)
        if self.ill is None:
            assert uid in self.claims.plugin.ledger.in_question
        asked = self.asked[uid]
        self.asked[uid] = AllocatedClaim(
            uid=uid, namespace="ml", name=uid, results=asked.results, pods={**asked.pods, PodUid(f"uid-{pod}"): pod}
        )
        assert self.claims.prepared(self.asked[uid]).holds == claim.holds
        assert uid not in self.claims.plugin.ledger.in_question

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), name=st.sampled_from(["main", "side"]), start=st.booleans())
    def create_of_claim(self, data: Any, name: str, start: bool) -> None:  # noqa: ANN401 - hypothesis'
        claim = self.prepared[data.draw(st.sampled_from(sorted(self.prepared)))]
        made = self.made_of(claim, data.draw(st.sampled_from(sorted(claim.pods.values()))), name)
        if start:
            self.started(made)

    @precondition(lambda self: self.given_by_claims() and self.plugin_node.devices.connected)
    @rule(data=st.data(), asks=st.sampled_from(["all", "1", "capabilities=utility"]), start=st.booleans())
    def create_beside_a_claim(self, data: Any, asks: str, start: bool) -> None:  # noqa: ANN401 - hypothesis'
        """A container that others injected: the annotation is for those that name the claim."""
        pod = data.draw(st.sampled_from(self.given_by_claims()))
        made = self.create(container(asks, of=pod, name="proxy"), None)
        assert not self.held[made.id].uuids
        if start:
            self.started(made)
            assert self.alive[made.id][1]

    def given_by_claims(self) -> list[str]:
        """The pods that have GPUs by claims, and not only to monitor."""
        return sorted({pod for claim in self.prepared.values() if claim.holds for pod in claim.pods.values()})

    def made_of(self, claim: PreparedClaim, pod: str, name: str) -> Container:
        made = self.create(with_claims(container(of=pod, name=name), claim), None)
        if made.id in self.alive:
            got = self.held[made.id].uuids
            assert got in (frozenset(), {each.uuid for each in claim.devices})  # all that it has, and no other
            shared = Mode.SHARED in claim.holds.values()
            self.held[made.id] = Held(frozenset(claim.holds) & got, shared)  # what it monitors, it does not hold
            self.of_claim[made.id] = claim
        return made

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), pods_first=st.sampled_from([True, True, False]))
    def unprepare(self, data: Any, pods_first: bool) -> None:  # noqa: ANN401 - hypothesis'
        """Not pods_first: as no kubelet does it; what runs goes on, and its GPUs are not given away."""
        uid = data.draw(st.sampled_from(sorted(self.prepared)))
        if pods_first:
            for pod in self.prepared[uid].pods.values():
                self.end_sandbox(pod)
        self.claims.unprepare(uid)
        self.claims.unprepare(uid)
        del self.asked[uid]

    def party(self, of: Container, has: GpuUuid) -> str:
        claim = self.of_claim.get(of.id)
        return claim.uid if claim and has in claim.holds else super().party(of, has)

    def kept_for(self) -> Iterable[tuple[GpuUuid, str, bool]]:
        return (
            (each, uid, mode is Mode.SHARED)
            for uid, claim in self.prepared.items()
            for each, mode in claim.holds.items()
        )

    @invariant()
    def claims_are_never_lost(self) -> None:
        if hasattr(self, "plugin_node"):
            assert self.prepared.keys() == self.asked.keys()

    @invariant()
    def what_claims_have_is_not_offered_to_the_kubelet(self) -> None:
        if self.alive or self.asked:
            offered = {device.uuid for device in self.healthy()}
            for has, _, shared in self.kept_for():
                assert has not in offered or (shared and self.shared)


TestThreeWays = ThreeWays.TestCase
