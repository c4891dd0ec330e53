"""No NVIDIA_VISIBLE_DEVICES grants a GPU that the kubelet does not list, and nothing runs two pods on one.

Nor does the kubelet count a GPU twice, or see one as free that is held, whoever gave it to the pod that holds it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import Allocated, AllocatedDevice, ContainerDevices, PodDevices
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.kubelet.advertised import AllocationError
from nri_gpu.kubelet.read_listing import Listing, external_allocation
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE
from tests.support.builders import container, gpu, held_node, mig_gpu, mig_uuid, node, pod, uuid
from tests.support.kubelet_nodes import GPU, OURS, RESERVED, SHARING, ExternalNode, again, from_kubelet, of_plugin

NODE = node([mig_gpu(0), *(gpu(index) for index in range(1, 4))])
UNITS = [*(uuid(index) for index in range(4)), mig_uuid(0), mig_uuid(0, 1)]
NAMES = st.sampled_from([*UNITS, "0", "1", "3", "9", "0:0", "0:1", "all", "none", "void", "", "nvidia.com/gpu=1", "é"])
VALUES = st.one_of(
    st.lists(NAMES, max_size=4).map(",".join),
    st.lists(NAMES, max_size=3).map(" , ".join),
    st.just(MOUNTED_NAMES),
    st.text(max_size=20),
)
IDS = st.sampled_from([*UNITS, f"{uuid(1)}::0", f"{uuid(1)}::1", f"{mig_uuid(0)}::0", "GPU-of-nobody"])
DEVICES = st.lists(
    st.builds(AllocatedDevice, st.sampled_from([GPU, "nvidia.com/mig-1g.5gb", OURS, "amd.com/gpu"]), IDS),
    max_size=3,
    unique=True,
).map(tuple)
LISTED = st.lists(
    st.builds(ContainerDevices, st.sampled_from(["main", "side"]), DEVICES),
    max_size=2,
    unique_by=lambda each: each.name,
).map(lambda each: PodDevices("ml", "train", tuple(each)))
RESERVATIONS = st.dictionaries(st.sampled_from(UNITS), st.frozensets(st.sampled_from(["g1", "g2"])), max_size=3)
LABELS = st.dictionaries(
    st.sampled_from(["runai-gpu-group", "runai-gpu-group/g1", "app"]), st.sampled_from(["g1", "g2", ""]), max_size=2
)
MOUNTS = st.frozensets(st.sampled_from(UNITS).map(lambda each: f"{MOUNTED_NAMES}/{each}"), max_size=2)


@given(
    value=st.none() | VALUES,
    mounts=MOUNTS,
    told=st.builds(Listing, st.none() | LISTED, RESERVATIONS),
    labels=LABELS,
    claim=st.sampled_from([None, "all", "1", "2;mode=shared", "none", "all;capabilities=utility", "device=0"]),
    namespace=st.sampled_from(["ml", RESERVED]),
)
def test_nothing_is_granted_that_the_kubelet_does_not_list(
    value: str | None, mounts: frozenset[str], told: Listing, labels: dict[str, str], claim: str | None, namespace: str
) -> None:
    of = container(
        of=pod(claim=claim, labels=labels, namespace=namespace),
        env={} if value is None else {VARIABLE: value},
        mounts=mounts,
    )
    found = external_allocation(of, told, NODE.inventory, SHARING)
    devices = found.devices if isinstance(found, Allocated) else ()
    granted = frozenset(each.uuid for each in devices)
    listed = (told.pod.container("main") or told.pod).devices if told.pod else ()
    own = {each.uuid for each in listed if each.resource.startswith("nvidia.com/") or each.resource == OURS}
    groups = set(labels.values())
    lent = {each for each, of_whom in told.reserved.items() if of_whom & groups}
    assert granted <= own or granted <= lent
    assert granted <= set(UNITS)

    decision = decide(replace(of, kubelet=found), NODE, Ledger(), replace(Policy.default(), kubelet=SHARING))
    # An annotation by itself is a request like any other; beside what was given it only shapes.
    if isinstance(decision, Inject) and found is not None and (claim is None or devices):
        assert set(decision.grant.uuids) <= own | lent
    if found is not None and not isinstance(found, Allocated):
        assert not isinstance(decision, Inject)


class BothKinds(RuleBasedStateMachine):
    """NVIDIA's device plugin and ours on one kubelet, an earlier one of our resource, and annotations.

    checkpoint: what the kubelet gave, by pod. Some had it of our resource before that was ours. told: pods that the
    kubelet has listed to this daemon.
    """

    pods = Bundle("pods")
    made = Bundle("made")
    old = Bundle("old")

    def __init__(self) -> None:
        super().__init__()
        self.node = ExternalNode(SHARING)
        self.node.put_gpus([gpu(index) for index in range(3)])
        self.alive: dict[ContainerId, tuple[Container, bool]] = {}
        self.grants: dict[ContainerId, tuple[GpuUuid, ...]] = {}
        self.checkpoint: dict[str, tuple[str, frozenset[str], Container]] = {}
        self.told: set[str] = set()
        self.number = 0

    @rule(
        target=pods,
        number=st.integers(1, 2),
        resource=st.sampled_from([GPU, OURS]),
        before_us=st.booleans(),
        by_index=st.booleans(),
        data=st.data(),
    )
    def admit(self, number: int, resource: str, before_us: bool, by_index: bool, data: Any) -> str:  # noqa: ANN401 - hypothesis'
        """Each plugin's devices are the kubelet's to give, whatever became of the other's."""
        self.number += 1
        name = f"pod-{self.number}"
        used = {id_ for of_what, ids, _ in self.checkpoint.values() if of_what == resource for id_ in ids}
        free = [uuid(index) for index in range(3) if uuid(index) not in used]
        if len(free) < number:
            return name
        ids = data.draw(st.permutations(free))[:number]
        named = [str([uuid(index) for index in range(3)].index(each)) if by_index else each for each in ids]
        of = replace(of_plugin(pod=name), env={VARIABLE: ",".join(named)})
        if resource == OURS and not before_us:
            try:
                annotations = self.node.allocate(*ids, resource=OURS)
            except AllocationError:
                return name
            of = from_kubelet(annotations, pod=name)
        self.node.lists(of, ids, resource)
        self.checkpoint[name] = (resource, frozenset(ids), of)
        self.node.sandbox_created(of)
        return name

    @rule(target=old, number=st.integers(1, 2), data=st.data())
    def came_before_us(self, number: int, data: Any) -> Container:  # noqa: ANN401 - hypothesis'
        """A pod of the device plugin that had our resource: its container has nodes of free GPUs, and we see it now."""
        self.number += 1
        name = f"old-{self.number}"
        held = {id_ for _, ids, _ in self.checkpoint.values() for id_ in ids}.union(*self.grants.values())
        free = [index for index in range(3) if uuid(index) not in held]
        gpus = data.draw(st.permutations(free))[:number]
        ids = tuple(map(uuid, gpus))
        of = container(of=name, devices=tuple(held_node(gpu(index)) for index in gpus))
        if ids:
            self.node.lists(of, ids, OURS)
            self.checkpoint[name] = (OURS, frozenset(ids), of)
            self.alive[of.id], self.grants[of.id], self.node.annotations[of.id] = (of, True), ids, {}
            self.restart()
        return of

    @rule(of=old)
    def end_old_pod(self, of: Container) -> None:
        self.end_pod(of.pod.name)

    @rule()
    def answer(self) -> None:
        self.node.answer()

    @rule()
    def list(self) -> None:
        self.node.list_all()
        self.told |= self.checkpoint.keys()

    @rule(target=made, pod=pods)
    def create_of_kubelet(self, pod: str) -> Container:
        return self._create(
            self.checkpoint[pod][2] if pod in self.checkpoint else of_plugin(pod=pod), self.checkpoint.get(pod)
        )

    @rule(target=made, index=st.integers(0, 2), claim=st.sampled_from(["1", "all", "device=0"]), labels=LABELS)
    def create_by_annotation(self, index: int, claim: str, labels: dict[str, str]) -> Container:
        return self._create(container(of=pod(f"local-{index}", claim, labels=labels)), None)

    @rule(target=made, index=st.integers(0, 2))
    def create_by_hand(self, index: int) -> Container:
        """Somebody writes the variable who was given nothing."""
        of = of_plugin(index, pod=f"forger-{index}")
        self.node.lists(of, [])
        made = self._create(of, None)
        assert not self.grants.get(made.id)
        return made

    def _create(self, of: Container, kept: tuple[str, frozenset[str], Container] | None) -> Container:
        self.number += 1
        of = again(of, self.number)
        got = self.node.create(of)
        if isinstance(got, tuple):
            assert kept is None or set(got) == kept[1]
            self.alive[of.id], self.grants[of.id] = (of, False), got
        return of

    @rule(of=made)
    def start(self, of: Container) -> None:
        if of.id in self.alive and not self.alive[of.id][1] and self.node.start(of):
            self.alive[of.id] = (of, True)

    @rule(of=made)
    def stop(self, of: Container) -> None:
        if of.id in self.alive:
            self.node.stop(of)
            del self.alive[of.id]

    @rule(pod=pods)
    def end_pod(self, pod: str) -> None:
        for of, _ in [each for each in self.alive.values() if each[0].pod.name == pod]:
            self.stop(of)
        self.node.pod_deleted(container(of=pod))
        self.checkpoint.pop(pod, None)

    @rule()
    def restart(self) -> None:
        kept = {id_: each for id_, each in self.alive.items() if id_ in self.node.annotations}
        self.node.restarted(kept)
        self.told.clear()

    @rule(seconds=st.sampled_from([1, 61, 2000]))
    def wait(self, seconds: int) -> None:
        self.node.clock.now += seconds

    @invariant()
    def nobody_shares_what_is_exclusive(self) -> None:
        on: dict[GpuUuid, set[str]] = {}
        for id_, (of, runs) in self.alive.items():
            if runs:
                for each in self.grants[id_]:
                    on.setdefault(each, set()).add(of.pod.uid)
        assert all(len(holders) == 1 for holders in on.values()), on

    def healthy(self) -> set[str]:
        return {device.id for device in self.node.devices.devices(OURS) if not device.why}

    def counted(self, resource: str) -> set[str]:
        return {id_ for of_what, ids, _ in self.checkpoint.values() if of_what == resource for id_ in ids}

    @invariant()
    def what_the_kubelet_sees_as_free_is_held_by_nobody(self) -> None:
        free = self.healthy() - self.counted(OURS)
        assert all(free.isdisjoint(self.grants[id_]) for id_, (_, runs) in self.alive.items() if runs)

    @invariant()
    def what_the_kubelet_counts_as_held_counts_once(self) -> None:
        """As far as it has told, its devices are healthy, but for those that it has allocated by another name, too."""
        own = {name for name, (of_what, *_) in self.checkpoint.items() if of_what == OURS and name in self.told}
        running = [id_ for id_, (of, runs) in self.alive.items() if runs and of.pod.name in own]
        twice = {each.uuid for each in self.node.plugin.ledger.reservations if each.resource == GPU}
        held = {each for id_ in running for each in self.grants[id_]}
        assert held - twice - self.counted(GPU) <= self.healthy()

    @invariant()
    def what_others_run_on_is_not_offered(self) -> None:
        healthy = self.healthy()
        for id_, (of, runs) in self.alive.items():
            kept = self.checkpoint.get(of.pod.name)
            if runs and self.grants[id_] and (kept is None or kept[0] == GPU):
                assert healthy.isdisjoint(self.grants[id_])


TestBothKinds = BothKinds.TestCase
