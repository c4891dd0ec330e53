"""No interleaving of the kubelet, of annotations, of health and of restarts runs two pods on one exclusive GPU.

On nodes of every kind: whole GPUs, MIG devices, replicas, a pool for the cluster, two kinds of GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.kubelet.advertised import AllocationError
from nri_gpu.ledger.reservations import OPEN_S
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from tests.support.builders import container, gpu, mig_gpu, uuid
from tests.support.kubelet_nodes import PluginNode, again, from_kubelet

GPUS: Final = 3
INDEX: Final = st.integers(0, GPUS - 1)
CLUSTER: Final = parse_policy(
    {"pool": [{"name": "cluster", "device": ["0", "2"]}], "kubelet": {"pool": "cluster"}}, "law"
)

KINDS: Final = parse_policy(
    {"pool": [{"name": "kind", "device": ["0", "2"]}], "kubelet": {"resources": {"nvidia.com/kind": "kind"}}}, "law"
)


class Given(NamedTuple):
    """What the kubelet keeps for one container: its checkpoint's."""

    resource: str
    ids: frozenset[str]
    annotations: Mapping[str, str]
    shared: bool

    @property
    def uuids(self) -> set[GpuUuid]:
        return {AllocatedDevice(self.resource, id_).uuid for id_ in self.ids}


class Held(NamedTuple):
    """What a container was granted, and whether others may have it too."""

    uuids: frozenset[GpuUuid]
    shared: bool


Name = tuple[str, str]  # of a pod and of a container


class OneLedger(RuleBasedStateMachine):
    """`alive`: what the runtime has, and whether it runs. `kept`: what the kubelet keeps for its pods' containers.

    allocated: when each device was given last, as far as this daemon remembers. sandboxes: how often a pod's was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[ContainerId, tuple[Container, bool]] = {}
        self.held: dict[ContainerId, Held] = {}
        self.checkpoint: dict[Name, Given] = {}
        self.allocated: dict[AllocatedDevice, float] = {}
        self.sandboxes: dict[str, int] = {}
        self.number = 0
        self.ill: int | None = None

    @initialize(
        replicas=st.sampled_from([1, 1, 2]),
        mig=st.booleans(),
        policy=st.sampled_from([Policy.default(), CLUSTER, KINDS]),
    )
    def node(self, replicas: int, mig: bool, policy: Policy) -> None:
        self.mig = mig
        self.plugin_node = self.made_node(
            policy, replace(policy.kubelet, mig_strategy=MigStrategy.MIXED, replicas=replicas, rename=False)
        )
        self.settings: KubeletSettings = self.plugin_node.settings
        self.put_gpus()

    def made_node(self, policy: Policy, settings: KubeletSettings) -> PluginNode:
        return PluginNode(policy, settings)

    def put_gpus(self) -> None:
        def made(index: int) -> Gpu:
            unavailable = "lost" * (index == self.ill)
            return (
                mig_gpu(index, unavailable=unavailable)
                if self.mig and index == 2
                else gpu(index, unavailable=unavailable)
            )

        self.plugin_node.put_gpus([made(index) for index in range(GPUS)])

    @property
    def shared(self) -> bool:
        return self.settings.replicas > 1

    def healthy(self) -> set[AllocatedDevice]:
        offers = self.plugin_node.devices
        return {
            AllocatedDevice(name, device.id)
            for name in offers.resources()
            for device in offers.devices(name)
            if not device.why
        }

    def known(self) -> set[AllocatedDevice]:
        offers = self.plugin_node.devices
        return {AllocatedDevice(name, device.id) for name in offers.resources() for device in offers.devices(name)}

    def in_use(self) -> set[AllocatedDevice]:
        return {AllocatedDevice(given.resource, id_) for given in self.checkpoint.values() for id_ in given.ids}

    # --- the kubelet ---

    @rule(
        data=st.data(),
        wants=st.lists(st.integers(1, 2), min_size=1, max_size=2),
        then=st.sampled_from(["", "created", "created", "runs", "runs"]),
    )
    def admit(self, data: Any, wants: list[int], then: str) -> None:  # noqa: ANN401 - hypothesis'
        """A pod of one or two containers; of what the kubelet thinks is free, which may be old news."""
        self.number += 1
        pod = f"pod-{self.number}"
        for name, number in zip(("main", "side"), wants, strict=False):
            free = sorted(self.known() - self.in_use(), key=lambda each: (each.resource, each.id))
            if not free:
                break
            resource = data.draw(st.sampled_from([each.resource for each in free]))
            ids = data.draw(st.permutations([each.id for each in free if each.resource == resource]))[:number]
            if not self.allocate(pod, name, resource, ids):
                for each in [each for each in self.checkpoint if each[0] == pod]:  # and the pod fails
                    del self.checkpoint[each]
                return
        for of, name in [each for each in self.checkpoint if each[0] == pod and then]:
            given = self.checkpoint[of, name]
            made = self.create(from_kubelet(given.annotations, pod=of, name=name), given)
            if then == "runs":
                self.started(made)

    def allocate(self, pod: str, name: str, resource: str, ids: list[str]) -> bool:
        healthy = self.healthy()
        devices = {AllocatedDevice(resource, id_) for id_ in ids}
        try:
            annotations = self.plugin_node.allocate(*ids, resource=resource)
        except AllocationError:
            assert not devices <= healthy
            return False
        assert devices <= healthy
        self.checkpoint[pod, name] = Given(resource, frozenset(ids), annotations, self.shared)
        self.allocated |= dict.fromkeys(devices, self.plugin_node.clock.now)
        return True

    @precondition(lambda self: self.checkpoint)
    @rule(data=st.data())
    def after_init(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """What a finished init container had is given to its pod's next one."""
        pod, name = data.draw(st.sampled_from(sorted(self.checkpoint)))
        given = self.checkpoint[pod, name]
        if not self.of(pod, name):
            next_name = f"{name}+"
            if self.allocate(pod, next_name, given.resource, sorted(given.ids)):
                del self.checkpoint[pod, name]
            else:
                self.pod_ended(pod)  # its admission fails

    @precondition(lambda self: self.checkpoint)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """A pod is given up before it had a container: the kubelet takes its GPUs back and tells nobody."""
        pod, _ = data.draw(st.sampled_from(sorted(self.checkpoint)))
        if not self.of(pod):
            self.checkpoint = {name: given for name, given in self.checkpoint.items() if name[0] != pod}

    @rule()
    def restart_kubelet(self) -> None:
        """Its pods are admitted anew, and fail where what they have is not healthy any more."""
        healthy = self.healthy()
        for (pod, _), given in list(self.checkpoint.items()):
            if not {AllocatedDevice(given.resource, id_) for id_ in given.ids} <= healthy:
                self.pod_ended(pod)

    # --- the runtime ---

    @precondition(lambda self: self.checkpoint)
    @rule(data=st.data(), claim=st.sampled_from([None, "all", "1;capabilities=utility"]), start=st.booleans())
    def create_of_kubelet(self, data: Any, claim: str | None, start: bool) -> None:  # noqa: ANN401 - hypothesis'
        pod, name = data.draw(st.sampled_from(sorted(self.checkpoint)))
        given = self.checkpoint[pod, name]
        of = self.create(from_kubelet(given.annotations, pod=pod, claim=claim, name=name), given)
        if start:
            self.started(of)

    @rule(
        index=INDEX,
        claim=st.sampled_from(["1", "2", "all", "device=0", "device=1", "1;mode=shared", "mig=1g.5gb"]),
        start=st.booleans(),
    )
    def create_by_annotation(self, index: int, claim: str, start: bool) -> None:
        of = self.create(container(claim, of=f"local-{index}"), None)
        if start:
            self.started(of)

    def create(self, of: Container, given: Given | None) -> Container:
        self.number += 1
        sandbox = PodId(f"sandbox-{of.pod.name}-{self.sandboxes.get(of.pod.name, 0)}")
        of = again(replace(of, pod=replace(of.pod, id=sandbox)), self.number)
        if not self.plugin_node.devices.connected:  # a runtime that asks nobody
            self.plugin_node.annotations[of.id] = {}
            self.alive[of.id], self.held[of.id] = (of, False), Held(frozenset(), False)
            return of
        got = self.plugin_node.create(of)
        if isinstance(got, tuple):
            assert given is None or set(got) == given.uuids  # what the kubelet gave, never another
            asks = of.pod.annotations.get("gpu.nri.io", "")
            shared = given.shared if given else "shared" in asks
            self.alive[of.id], self.held[of.id] = (of, False), Held(frozenset(got), shared)
            if of.pod.name.startswith("local") and not shared:
                self.check_was_free(set(got))
        return of

    def check_was_free(self, got: set[GpuUuid]) -> None:
        """Annotations got nothing that the kubelet gave lately, nor what is the cluster's."""
        now = self.plugin_node.clock.now
        lately = {device.uuid for device, at in self.allocated.items() if now - at <= OPEN_S}
        assert got.isdisjoint(lately)
        if self.settings.pool:
            assert got.isdisjoint(each.uuid for each in self.known())

    def one(self, data: Any, *, runs: bool | None = None, local: bool = False) -> Container | None:  # noqa: ANN401
        """Of those that there are."""
        found = sorted(
            id_
            for id_, (of, is_) in self.alive.items()
            if runs in (None, is_) and (of.pod.name.startswith("local") or not local)
        )
        return self.alive[data.draw(st.sampled_from(found))][0] if found else None

    @rule(data=st.data())
    def start(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        if of := self.one(data, runs=False):
            self.started(of)

    def started(self, of: Container) -> None:
        """Not while we are away: of one that lapsed nobody can say then whose its GPUs are."""
        if of.id in self.alive and self.plugin_node.devices.connected and self.plugin_node.start(of):
            self.alive[of.id] = (of, True)

    @rule(data=st.data())
    def stop(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        if of := self.one(data):
            self.stopped(of)

    def stopped(self, of: Container) -> None:
        if self.plugin_node.devices.connected:
            self.plugin_node.stop(of)
        else:
            self.gone_unseen(of)
        del self.alive[of.id]

    def gone_unseen(self, of: Container) -> None:
        """Nothing shows that it had been there, and had what the kubelet gave."""
        if given := self.checkpoint.get((of.pod.name, of.name)):
            for id_ in given.ids:
                self.allocated.pop(AllocatedDevice(given.resource, id_), None)

    @rule(data=st.data())
    def remove(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """Without a stop before: one whose start failed, or that ended while nobody told."""
        if of := self.one(data):
            if self.plugin_node.devices.connected:
                self.plugin_node.event(pb.REMOVE_CONTAINER, of)
            else:
                self.gone_unseen(of)
            del self.alive[of.id]

    @rule(data=st.data())
    def restart_in_place(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """One that runs by annotation finds its GPUs again: they are reserved for nobody."""
        of = self.one(data, runs=True, local=True)
        claim = of.pod.annotations["gpu.nri.io"] if of else "all"
        waits = self.plugin_node.plugin.ledger.in_question  # until it is known whether its pod shares these claims
        if of and claim != "all" and self.ill is None and self.plugin_node.devices.connected and not waits:
            self.stopped(of)
            anew = self.create(container(claim, of=of.pod.name), None)
            assert not self.held[of.id].uuids or anew.id in self.alive, claim
            self.started(anew)

    @precondition(lambda self: self.checkpoint)
    @rule(data=st.data())
    def end_pod(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        self.pod_ended(data.draw(st.sampled_from(sorted(self.checkpoint)))[0])

    def pod_ended(self, pod: str) -> None:
        self.end_sandbox(pod)
        self.checkpoint = {name: given for name, given in self.checkpoint.items() if name[0] != pod}

    @precondition(lambda self: self.checkpoint)
    @rule(data=st.data(), told=st.booleans())
    def remake_sandbox(self, data: Any, told: bool) -> None:  # noqa: ANN401 - hypothesis'
        """The pod lives on, and its containers find what the kubelet gave them. told: of each container's end, too."""
        pod, _ = data.draw(st.sampled_from(sorted(self.checkpoint)))
        had = [of for of, _ in self.of(pod) if self.held[of.id].uuids]
        running = {of.name for of, runs in self.of(pod) if runs}
        self.end_sandbox(pod, told=told)
        for of in {of.name: of for of in had if of.name in running}.values():
            given = self.checkpoint.get((pod, of.name))
            if given and self.plugin_node.devices.connected and self.ill is None:
                anew = self.create(from_kubelet(given.annotations, pod=pod, name=of.name), given)
                assert anew.id in self.alive
                self.started(anew)

    def end_sandbox(self, pod: str, *, told: bool = True) -> None:
        for of, _ in self.of(pod):
            if told:
                self.stopped(of)
            else:
                del self.alive[of.id]
        if self.plugin_node.devices.connected:
            ended = container(of=pod)
            sandbox = PodId(f"sandbox-{pod}-{self.sandboxes.get(pod, 0)}")
            self.plugin_node.end_pod(replace(ended, pod=replace(ended.pod, id=sandbox)))
        self.sandboxes[pod] = self.sandboxes.get(pod, 0) + 1

    def of(self, pod: str, name: str | None = None) -> list[tuple[Container, bool]]:
        return [each for each in self.alive.values() if each[0].pod.name == pod and name in (None, each[0].name)]

    # --- the daemon ---

    @rule(ill=st.sampled_from([None, None, *range(GPUS)]))
    def health(self, ill: int | None) -> None:
        self.ill = ill
        self.put_gpus()

    @rule(late=st.booleans(), replicas=st.sampled_from([None, None, 1, 2]))
    def restart(self, late: bool, replicas: int | None) -> None:
        """late: the tokens' key is not there yet as the runtime lists its containers. replicas: by another policy."""
        self.settings = replace(self.settings, replicas=replicas or self.settings.replicas)
        self.plugin_node.settings = self.settings
        self.plugin_node.restart_daemon()
        if late:
            self.plugin_node.plugin.kubelet.key, self.plugin_node.plugin.kubelet.awaited = None, True
        self.allocated.clear()
        self.back()
        if late:
            self.plugin_node.keyed()

    @precondition(lambda self: self.plugin_node.devices.connected)
    @rule(long=st.sampled_from([False, False, True]))
    def away(self, long: bool) -> None:
        self.plugin_node.devices.connected = False
        if not long:
            self.back()

    @precondition(lambda self: not self.plugin_node.devices.connected)
    @rule()
    def back(self) -> None:
        """The connection is made anew: the runtime lists what there is."""
        self.plugin_node.devices.connected = True
        self.plugin_node.relist(self.alive.values())

    @rule(seconds=st.sampled_from([1, 61, 2000]))
    def wait(self, seconds: int) -> None:
        """A daemon with a device plugin looks at its clock every few seconds."""
        self.plugin_node.clock.now += seconds
        self.plugin_node.plugin.lapse()

    # --- the laws ---

    @invariant()
    def nobody_shares_what_is_exclusive(self) -> None:
        on: dict[GpuUuid, set[tuple[str, bool]]] = {}
        for id_, (of, runs) in self.alive.items():
            if runs:
                for each in self.held[id_].uuids:
                    on.setdefault(each, set()).add((self.party(of, each), self.held[id_].shared))
        for each, party, shared in self.kept_for():
            on.setdefault(each, set()).add((party, shared))
        for holders in on.values():
            assert len(holders) == 1 or all(shared for _, shared in holders), holders

    def party(self, of: Container, has: GpuUuid) -> str:
        """For whom a container has a GPU: others of the same party may have it, too."""
        del has
        return of.pod.uid

    def kept_for(self) -> Iterable[tuple[GpuUuid, str, bool]]:
        """GPUs that parties have although no container runs on them; whether others may have them."""
        return ()

    @invariant()
    def what_annotations_run_on_is_not_offered(self) -> None:
        if not self.alive:
            return
        offered = {device.uuid for device in self.healthy()}
        for id_, (of, runs) in self.alive.items():
            if runs and of.pod.name.startswith("local") and not (self.shared and self.held[id_].shared):
                assert offered.isdisjoint(self.held[id_].uuids)

    @invariant()
    def what_the_kubelet_sees_as_free_is_held_by_nobody(self) -> None:
        if not self.alive:
            return
        free = {device.uuid for device in self.healthy() - self.in_use()}
        for id_, (_, runs) in self.alive.items():
            assert not runs or (self.shared and self.held[id_].shared) or free.isdisjoint(self.held[id_].uuids)

    @invariant()
    def nothing_is_offered_that_nobody_would_inject(self) -> None:
        if self.alive and not self.plugin_node.devices.connected:
            assert not self.healthy()

    @invariant()
    def what_only_the_kubelets_pods_hold_is_offered(self) -> None:
        """They are its own to count: a pod whose GPU it cannot see any more would fail at its next admission.

        But for those that it allocated by an id of before a restart: it would count none of the ids of now.
        """
        if not self.plugin_node.devices.connected or not self.checkpoint:
            return
        offered = {device.uuid for device in self.healthy()}
        others = {
            uuid
            for id_, (of, _) in self.alive.items()
            if of.pod.name.startswith("local")
            for uuid in self.held[id_].uuids
        }
        known = self.known()
        earlier = {device.uuid for device in self.in_use() if device not in known}
        for id_, (of, runs) in self.alive.items():
            if runs and (of.pod.name, of.name) in self.checkpoint and earlier.isdisjoint(self.held[id_].uuids):
                lost = {uuid(self.ill)} if self.ill is not None else set()
                assert self.held[id_].uuids - others - lost <= offered or (self.ill == 2 and self.mig)


TestOneLedger = OneLedger.TestCase
