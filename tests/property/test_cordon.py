"""Laws of GPUs out of use, behind all three ways: what had one keeps it, and nothing new gets it, come what may."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu.cordon.cordon_controller import CordonController, command
from nri_gpu.decision.cordoned import in_use
from nri_gpu.decision.decide import decide
from nri_gpu.decision.refusals import CORDONED
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Container
from nri_gpu.domain.cordons import NO_CORDONS, Cordons, marked
from nri_gpu.domain.decision import Inject
from nri_gpu.domain.gpu import GpuUuid, described
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.kubelet.advertised import AllocationError
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import Changed
from tests.property import strategies
from tests.property.test_kubelet import INDEX, Given
from tests.property.test_three_ways import ThreeWays
from tests.support.builders import mig_uuid, uuid
from tests.support.claim_nodes import ClaimNode


class ThreeWaysAndACordon(ThreeWays):
    """had: units out of use -> pods and claims that had each when it went out of use."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.had: dict[GpuUuid, set[str]] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    def made_node(self, policy: Policy, settings: KubeletSettings) -> ClaimNode:
        made = super().made_node(policy, settings)
        self.follow(made)
        return made

    def follow(self, node: ClaimNode) -> None:
        state = node.node_state
        self.cordons = CordonController(Path(self.folder.name), state, told=lambda *_: None, monotonic=lambda: 0.0)
        self.cordons.begin()
        state.then(self.cordons.follow_ledger, Changed.LEDGER)

    def units(self, index: int) -> list[GpuUuid]:
        return [uuid(index), mig_uuid(index, 0), mig_uuid(index, 1)]

    @rule(index=INDEX)
    def cordon(self, index: int) -> None:
        outcome = asyncio.run(self.cordons.cordon(command(str(index), "law", "root", until_reset=False)))
        if outcome.fault:
            assert uuid(index) in self.had
            return
        for unit in self.units(index):
            self.had[unit] = {of.pod.name for id_, (of, _) in self.alive.items() if unit in self.held[id_].uuids}
            self.had[unit] |= {pod for (pod, _), each in self.checkpoint.items() if unit in each.uuids}
            self.had[unit] |= {
                name for claim in self.prepared.values() if unit in {each.uuid for each in claim.devices}
                for name in (claim.uid, *claim.pods.values())
            }  # fmt: skip

    @precondition(lambda self: self.had)
    @rule(index=INDEX)
    def uncordon(self, index: int) -> None:
        asyncio.run(self.cordons.uncordon(f"{index} root"))
        for unit in self.units(index):
            self.had.pop(unit, None)

    def allocate(self, pod: str, name: str, resource: str, ids: list[str]) -> bool:
        if self.had.keys().isdisjoint(AllocatedDevice(resource, id_).uuid for id_ in ids):
            return super().allocate(pod, name, resource, ids)
        with suppress(AllocationError):
            self.plugin_node.allocate(*ids, resource=resource)
            raise AssertionError("the kubelet was given what is out of use")
        return False

    def create(self, of: Container, given: Given | None) -> Container:
        made = super().create(of, given)
        theirs = {uid: claim for uid, claim in self.prepared.items() if made.pod.uid in claim.pods}
        watched = {each.uuid for claim in theirs.values() for each in claim.devices if each.admin}
        for unit in (self.held[made.id].uuids & self.had.keys()) - watched if made.id in self.alive else ():
            assert not self.had[unit].isdisjoint({made.pod.name, *theirs}), "it had it not before"
        return made

    @invariant()
    def what_the_kubelet_gave_to_a_pod_that_is_here_is_not_unhealthy_for_being_out_of_use(self) -> None:
        if not self.had:
            return
        why = {
            AllocatedDevice(name, device.id): device.why
            for name in self.plugin_node.devices.resources()
            for device in self.plugin_node.devices.devices(name)
        }
        for (pod, name), each in self.checkpoint.items():
            holding = [of for of, _ in self.of(pod, name) if self.held[of.id].uuids == each.uuids]
            if holding and self.plugin_node.devices.connected:
                for id_ in each.ids:
                    assert why.get(AllocatedDevice(each.resource, id_)) != CORDONED

    @invariant()
    def what_nobody_has_is_offered_to_nobody(self) -> None:
        if self.had:
            kept = {each.uuid for each in self.in_use()} | {
                unit for id_ in self.alive for unit in self.held[id_].uuids
            }  # fmt: skip
            lately = {device.uuid for device in self.plugin_node.plugin.ledger.reservations}
            assert not {each.uuid for each in self.healthy()} & (self.had.keys() - kept - lately)


TestThreeWaysAndACordon = ThreeWaysAndACordon.TestCase


def cordoned(inventory: Inventory, indices: set[int], ids: frozenset[str]) -> Inventory:
    gpus = [gpu for gpu in inventory.gpus if gpu.index in indices]
    units = [each for gpu in gpus for each in (gpu.uuid, *(part.uuid for part in gpu.mig))]
    return marked(inventory, Cordons(frozenset(gpu.uuid for gpu in gpus), dict.fromkeys(units, ids)))


@settings(max_examples=150)
@given(
    strategies.containers(), strategies.nodes, strategies.ledgers, strategies.policies,
    st.sets(st.integers(0, 7)),
)  # fmt: skip
def test_to_what_had_them_nothing_changed_and_others_get_none(
    container: Container, node: Node, ledger: Ledger, policy: Policy, indices: set[int]
) -> None:
    """Marking is undone whole, too."""
    theirs = cordoned(node.inventory, indices, frozenset({container.pod.uid}))
    as_before = decide(container, replace(node, inventory=theirs), ledger, policy)
    assert as_before == decide(container, node, ledger, policy)
    nobodys = cordoned(node.inventory, indices, frozenset())
    new = decide(replace(container, kubelet=None), replace(node, inventory=nobodys), ledger, policy)
    out = {unit.uuid for unit in nobodys.units if described(unit).cordon}
    if isinstance(new, Inject):
        assert out.isdisjoint(new.grant.uuids)
        assert out.isdisjoint(new.completes)
    assert marked(theirs, NO_CORDONS) == marked(node.inventory, NO_CORDONS)
    assert in_use(theirs, {container.pod.uid}) == marked(node.inventory, NO_CORDONS)
