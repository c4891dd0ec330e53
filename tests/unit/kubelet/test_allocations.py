"""How long the kubelet's allocations hold: before a container, between two of one pod, after the pod, without a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, DeviceRef, PodId
from nri_gpu.kubelet.read_listing import without_unnamed
from nri_gpu.ledger.events import DevicesAllocated
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.ledger.recording import Remembered
from nri_gpu.ledger.reservations import OPEN_S, SETTLED_S
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import LedgerSettings, Policy
from nri_gpu.policy.read import parse_policy
from tests.support import builders
from tests.support.builders import container, gpu, held_node, mig_gpu, mig_uuid, uuid
from tests.support.kubelet_nodes import GPU, INJECTING, OURS, ExternalNode, PluginNode, again, from_kubelet, of_plugin
from tests.support.ledgers import after

GRACE_S = 61.0


@pytest.fixture
def node() -> PluginNode:
    return PluginNode()


def given(node: PluginNode, *indices: int, pod: str = "train", name: str = "main") -> Container:
    """A container that the kubelet has just allocated for."""
    annotations = node.allocate(*(uuid(index) for index in indices))
    return from_kubelet(annotations, pod=pod, name=name)


def running(node: PluginNode, of: Container) -> Container:
    assert isinstance(node.create(of), tuple)
    assert node.start(of)
    return of


def remade(of: Container) -> Container:
    """Its pod's next container, in a sandbox made anew."""
    return replace(again(of), pod=replace(of.pod, id=PodId(f"{of.pod.id}-anew")))


def removed(node: PluginNode, of: Container) -> None:
    node.event(pb.REMOVE_CONTAINER, of)


def reservations(node: PluginNode) -> int:
    return len(node.plugin.ledger.reservations)


def test_one_that_never_started_finds_its_gpu_at_its_next_attempt(node: PluginNode) -> None:
    """A start that fails inside runc sends no event, and the kubelet waits for up to 5 minutes before the next."""
    first = given(node, 0)
    assert node.create(first) == (uuid(0),)
    node.clock.now += GRACE_S
    assert "held exclusively by ml/train" in str(node.create(container("device=0", of="thief")))
    assert node.create(again(first)) == (uuid(0),)


@pytest.mark.parametrize("grace_s", [GRACE_S, 3600])
def test_what_nobody_comes_for_is_free_after_a_quarter_of_an_hour(node: PluginNode, grace_s: int) -> None:
    node.plugin.state.use(Policy(ledger=LedgerSettings(created_grace_s=grace_s)))
    given(node, 0)
    node.clock.now += OPEN_S - 1
    assert "held exclusively by" in str(node.create(container("device=0", of="local")))
    node.clock.now += 2
    assert node.create(container("device=0", of="local")) == (uuid(0),)


def test_a_lapsed_grant_is_no_reservation_for_life(node: PluginNode) -> None:
    never = given(node, 0)
    node.create(never)
    node.clock.now += GRACE_S
    node.plugin.lapse()
    node.clock.now += OPEN_S + GRACE_S
    local = running(node, container("device=0", of="local"))
    removed(node, never)
    node.stop(local)
    assert node.create(again(local)) == (uuid(0),)
    assert not reservations(node)


@pytest.mark.parametrize("late", [True, False], ids=["it lapsed and started", "it never started"])
def test_one_that_is_stopped_and_removed_leaves_one_reservation(node: PluginNode, late: bool) -> None:
    of = given(node, 0)
    node.create(of)
    if late:
        node.clock.now += GRACE_S
        node.plugin.lapse()
        assert reservations(node) == 1
        assert node.start(of)
        assert not reservations(node)
    node.stop(of)
    removed(node, of)
    assert reservations(node) == 1
    assert node.create(again(of)) == (uuid(0),)


def test_a_sandbox_made_anew_finds_the_pods_gpus(node: PluginNode) -> None:
    """The kubelet's grant is the pod's, and its checkpoint replays it; the sandbox is the runtime's matter."""
    of = running(node, given(node, 0))
    node.stop(of)
    node.end_pod(of)
    assert "ml/train" in str(node.create(container("device=0", of="thief")))
    assert not any(device.why for device in node.devices.devices(GPU))
    second = running(node, remade(of))
    node.event(pb.REMOVE_POD_SANDBOX, of)  # the old one's, late
    node.stop(second)
    assert "ml/train" in str(node.create(container("device=0", of="thief")))
    assert node.create(again(second, 2)) == (uuid(0),)


def test_a_pod_that_is_over_keeps_its_gpus_for_a_while_from_annotations_only(node: PluginNode) -> None:
    of = running(node, given(node, 0, 1))
    node.stop(of)
    node.end_pod(of)
    assert running(node, given(node, 0, pod="next"))  # the kubelet's word about an id
    node.clock.now += OPEN_S
    node.event(pb.REMOVE_POD_SANDBOX, of)  # does not begin it anew
    node.clock.now += GRACE_S
    assert node.create(container("device=1", of="local")) == (uuid(1),)


def test_a_later_word_of_the_kubelets_outlasts_the_end_of_the_one_before(node: PluginNode) -> None:
    first = running(node, given(node, 0))
    node.clock.now += OPEN_S
    second = given(node, 0, pod="next")
    node.stop(first)
    node.end_pod(first)
    assert node.create(second) == (uuid(0),)


def test_a_reservation_that_lapsed_is_in_nobodys_way(node: PluginNode) -> None:
    old = running(node, given(node, 0, pod="old"))
    node.stop(old)
    node.end_pod(old)
    node.clock.now += OPEN_S + GRACE_S
    node.plugin.lapse()
    new = running(node, from_kubelet(old.annotations, pod="new"))  # the kubelet's checkpoint, and a daemon without it
    node.stop(new)
    assert "ml/new" in str(node.create(container("device=0", of="thief")))


def without_key(node: PluginNode, *containers: Container) -> None:
    """A daemon that has not read the key yet, and the runtime's list."""
    node.restart_daemon()
    node.plugin.kubelet.key, node.plugin.kubelet.awaited = None, True
    node.relist([(each, True) for each in containers])


def test_a_key_that_comes_late_vouches_for_no_forgery_and_nothing_that_is_over(node: PluginNode) -> None:
    over, local = running(node, given(node, 0)), running(node, container("device=1", of="local"))
    forger = replace(local, annotations={key: "v1" for key in over.annotations})
    without_key(node, over, forger)
    node.stop(over)
    node.keyed()
    assert [bool(device.why) for device in node.devices.devices(GPU)] == [False, True, False, False]
    assert node.create(container("device=0", of="next")) == (uuid(0),)


@pytest.mark.parametrize("late", [True, False])
def test_one_that_no_list_had_is_still_the_kubelets(node: PluginNode, late: bool) -> None:
    """Created while a Synchronize was under way; its GPU would be unhealthy for as long as it runs."""
    of = given(node, 0)
    node.create(of)
    if late:
        without_key(node)
    else:
        node.restarted({})
    assert node.start(replace(of, annotations={**of.annotations, **node.annotations[of.id]}))
    if late:
        node.keyed()
    assert not any(device.why for device in node.devices.devices(GPU))


def test_the_kubelets_last_word_about_an_id_counts(node: PluginNode) -> None:
    """The pod before was given up; its container's reservation must not be in the way of the next pod's."""
    first = running(node, given(node, 0, pod="one"))
    node.stop(first)
    second = from_kubelet(first.annotations, pod="two")
    assert "ml/one" in str(node.create(second))  # not before it was given anew
    node.allocate(uuid(0))
    assert node.create(again(second)) == (uuid(0),)


def test_a_pool_divides_the_node() -> None:
    policy = parse_policy({"pool": [{"name": "cluster", "device": ["0", "1"]}], "kubelet": {"pool": "cluster"}}, "x")
    node = PluginNode(policy)
    assert [device.id for device in node.devices.devices(GPU)] == [uuid(0), uuid(1)]
    assert node.create(container("2", of="local")) == (uuid(2), uuid(3))
    assert 'in pool "cluster", which is kept for others' in str(node.create(container("device=0", of="more")))
    assert node.create(given(node, 0)) == (uuid(0),)


def test_what_policy_refuses_for_its_age_is_not_offered() -> None:
    node = PluginNode(parse_policy({"inventory": {"stale": "refuse", "stale_after_s": 100}}, "x"))
    assert not any(device.why for device in node.devices.devices(GPU))
    node.age_s = 101.0
    assert all(device.why for device in node.devices.devices(GPU))


def test_a_grant_that_only_the_journal_knows_makes_no_device_unhealthy(
    node: PluginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Job's, say, that started and ended while the daemon was away: nothing tells that it was the kubelet's."""
    grant = builders.grant(1, to=container(of="gone"))
    monkeypatch.setattr(node.recorder, "remembered", lambda _: [Remembered(grant, node.clock())])
    node.relist([])
    assert node.plugin.ledger.entries[grant.container_id].holds
    assert not node.taken()
    node.node_state.commit(builders.ledger(builders.entry(1, phase=GrantPhase.CREATED)))
    assert node.taken() == {uuid(1)}


# --- pods of whose end the runtime will not tell: its list brought them, and it was restarted -------------------------


def test_what_a_listed_pod_had_lapses_after_its_last_container(node: PluginNode) -> None:
    """Without PodResources nobody tells that the pod is over."""
    side = replace(given(node, 1, name="side"), id=ContainerId("train.side"))
    first, second = running(node, given(node, 0)), running(node, side)
    node.relist([(first, True), (second, True)])
    node.stop(first)
    node.clock.now += OPEN_S + 1
    assert "held exclusively by ml/train" in str(node.create(container("device=0", of="thief")))  # the other one runs
    node.stop(second)
    node.clock.now += OPEN_S - 1
    assert "held exclusively by ml/train" in str(node.create(container("device=0", of="thief")))
    node.clock.now += 2
    assert node.create(container("device=0", of="thief")) == (uuid(0),)


def test_what_a_new_pod_had_stays_until_its_sandbox_is_gone(node: PluginNode) -> None:
    node.relist([])
    node.stop(running(node, given(node, 0)))
    node.clock.now += 10 * OPEN_S
    assert "held exclusively by ml/train" in str(node.create(container("device=0", of="thief")))


def test_what_a_forgotten_sandbox_had_lapses(node: PluginNode) -> None:
    """CRI does not list it, or there is another one of its name."""
    made = running(node, given(node, 0))
    node.stop(made)
    node.plugin.sandbox_forgotten(made.pod.id)
    node.clock.now += OPEN_S - 1
    assert "held exclusively by ml/train" in str(node.create(container("device=0", of="thief")))
    node.clock.now += 2
    assert node.create(container("device=0", of="thief")) == (uuid(0),)


# --- pods of an earlier device plugin: the kubelet counts their GPUs, and their containers have these from it ------

SERVED = KubeletSettings(enabled=True)
TWICE = replace(SERVED, replicas=2)


def of_earlier(*indices: int, pod: str = "old", **fields: Any) -> Container:  # noqa: ANN401 - any field of a Container
    """A container that got the nodes of these GPUs before we came."""
    return container(of=pod, devices=tuple(held_node(gpu(index)) for index in indices), **fields)


def changed_over(
    settings: KubeletSettings, *old: Container, ids: Sequence[str] = (), resource: str = GPU
) -> ExternalNode:
    """A node on which these run. ids: what the kubelet lists for the first of them."""
    node = ExternalNode(settings)
    node.annotations = {each.id: {} for each in old}
    node.relist([(each, True) for each in old])
    node.lists(old[0], ids, resource)
    node.list_all()
    return node


def offered(node: PluginNode, resource: str = GPU) -> list[str]:
    return [device.id for device in node.devices.devices(resource) if not device.why]


def test_the_gpus_of_an_earlier_plugins_pods_count_once() -> None:
    """Seen: 4 GPUs, 2 of them held, and 2 that could be allocated less the 2 that the kubelet counted as held."""
    old = of_earlier(0, 2)
    node = changed_over(SERVED, old)
    assert offered(node) == [uuid(1), uuid(3)]  # the kubelet has not told
    node.lists(old, [uuid(0), uuid(2)])
    node.list_all()
    assert offered(node) == [uuid(index) for index in range(4)]
    assert "held exclusively by ml/old" in str(node.create(container("device=0", of="thief")))
    assert "ml/old" in str(node.create(given(node, 0, pod="next")))  # a kubelet that is wrong gives it to nobody twice
    node.stop(old)
    node.pod_deleted(old)
    assert node.create(given(node, 0, pod="next")) == (uuid(0),)


NOT_COUNTED: dict[str, tuple[KubeletSettings, Container, Sequence[str], str]] = {
    "another GPU is listed": (SERVED, of_earlier(0), [uuid(1)], GPU),
    "a resource of another plugin's": (replace(SERVED, resource=OURS), of_earlier(0), [uuid(0)], GPU),
    "one that we inject for": (INJECTING, of_earlier(0), [uuid(0)], GPU),
    "a replica, and none is offered": (SERVED, of_earlier(0), [f"{uuid(0)}::0"], GPU),
    "none, and only replicas are offered": (TWICE, of_earlier(0), [uuid(0)], GPU),
    "one of more replicas than are offered": (TWICE, of_earlier(0), [f"{uuid(0)}::2"], GPU),
    "the resource has another name by now": (replace(TWICE, rename=True), of_earlier(0), [f"{uuid(0)}::0"], GPU),
}


@pytest.mark.parametrize(("settings", "old", "ids", "resource"), NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_what_the_kubelet_does_not_count_as_this_device_is_not_offered(
    settings: KubeletSettings, old: Container, ids: Sequence[str], resource: str
) -> None:
    node = changed_over(settings, old, ids=ids, resource=resource)
    (main,) = node.devices.resources()
    units = {id_.partition("::")[0] for id_ in offered(node, main)}
    assert units == {uuid(index) for index in (1, 2, 3)}


def test_a_device_that_is_one_of_another_pods_is_not_offered() -> None:
    """Of two containers on a GPU the kubelet counts one; and it lists a device that this node has not."""
    node = changed_over(SERVED, of_earlier(0), of_earlier(0, 1, pod="stranger"), ids=[uuid(0), "GPU-of-nobody"])
    assert offered(node) == [uuid(2), uuid(3)]


def test_replicas_of_an_earlier_plugin_are_counted() -> None:
    node = changed_over(TWICE, of_earlier(0), ids=[f"{uuid(0)}::0"])
    assert len(offered(node)) == 8


def test_mig_devices_of_an_earlier_plugin_are_counted() -> None:
    settings = replace(SERVED, mig_strategy=MigStrategy.MIXED)
    cut, part = mig_gpu(0), "nvidia.com/mig-1g.5gb"
    minors = (cut.mig[1].gpu_instance_minor, cut.mig[1].compute_instance_minor)
    caps = [DeviceRef(f"/dev/nvidia-caps/nvidia-cap{minor}", 510, minor) for minor in minors if minor]
    node = ExternalNode(settings)
    node.put_gpus([cut, gpu(1)])
    old = replace(of_earlier(), devices=(held_node(cut), *caps))
    node.annotations = {old.id: {}}
    node.relist([(old, True)])
    assert offered(node, part) == [mig_uuid(0)]
    node.lists(old, [mig_uuid(0, 1)], part)
    node.list_all()
    assert offered(node, part) == [mig_uuid(0), mig_uuid(0, 1)]
    assert offered(node) == [uuid(1)]


def test_a_pods_own_gpu_is_not_in_its_next_containers_way() -> None:
    """One container of the pod has the GPU from the plugin before, another one by our answer."""
    old = of_earlier(0)
    node = changed_over(SERVED, old, ids=[uuid(0)])
    side = given(node, 0, pod="old", name="side")
    assert running(node, side)
    node.list_all()
    assert len(offered(node)) == 4
    node.stop(side)
    assert node.create(again(side)) == (uuid(0),)
    assert "held exclusively by ml/old" in str(node.create(container("device=0", of="thief")))


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [(SERVED, TWICE, 6), (SERVED, replace(SERVED, resource=OURS), 3), (TWICE, SERVED, 3), (TWICE, TWICE, 8)],
    ids=["more replicas", "another name", "no replicas", "no change"],
)
def test_what_our_own_pods_hold_by_an_earlier_id_is_not_free(
    before: KubeletSettings, after: KubeletSettings, left: int
) -> None:
    """The kubelet would see a free device there, and the pod that got it would wait for as long as the other runs."""
    node = ExternalNode(before)
    replica = f"{uuid(0)}::1" if before.replicas > 1 else uuid(0)
    of = running(node, from_kubelet(node.allocate(replica)))
    node.policy, node.settings = replace(node.policy, kubelet=after), after
    node.restarted({of.id: (of, True)})
    node.lists(of, [replica])
    node.list_all()
    assert len(offered(node, after.resource)) == left
    node.stop(of)  # and the kubelet will start it again
    assert len(offered(node, after.resource)) == left
    node.pod_deleted(of)
    assert len(offered(node, after.resource)) == 4 * after.replicas


def test_the_way_back_our_pods_keep_what_they_have_and_block_nothing_else() -> None:
    """NVIDIA's device plugin allocates again, and the kubelet counts our pods' GPUs as that resource's."""
    node = ExternalNode(SERVED)
    ours, over = running(node, given(node, 0, pod="ours")), running(node, given(node, 1, pod="over"))
    node.stop(over)
    back = KubeletSettings(inject_for=Globs((GPU,)))
    node.policy, node.settings = replace(node.policy, kubelet=back), back
    node.restarted({ours.id: (ours, True)})
    node.plugin.kubelet.key = None
    node.lists(ours, [uuid(0)])
    node.list_all()
    new = of_plugin(1, pod="new")
    node.admitted(new, [uuid(1)])
    assert node.create(new) == (uuid(1),)
    wrong = of_plugin(0, pod="wrong")  # a plugin that has lost count
    node.admitted(wrong, [uuid(0)])
    assert "held exclusively by ml/ours" in str(node.create(wrong))
    node.stop(ours)
    node.pod_deleted(ours)
    assert node.create(wrong) == (uuid(0),)


@pytest.mark.parametrize(
    "settings", [KubeletSettings(inject_for=Globs((GPU,))), INJECTING], ids=["ours is off", "ours has another name"]
)
def test_on_the_way_back_a_container_of_our_pods_starts_again(settings: KubeletSettings) -> None:
    """With our answer from the checkpoint, for a resource that is another plugin's by now."""
    node = ExternalNode(SERVED)
    ours, other = running(node, given(node, 0, pod="ours")), given(node, 1, pod="other")
    node.policy, node.settings = replace(node.policy, kubelet=settings), settings
    node.restarted({ours.id: (ours, True)})
    node.plugin.kubelet.key = node.plugin.kubelet.key if settings.enabled else None
    node.lists(ours, [uuid(0)])
    node.list_all()
    node.stop(ours)
    assert running(node, again(ours))
    copied = replace(other, annotations=ours.annotations)
    node.admitted(copied, [])
    assert str(node.create(copied)).startswith("nri-gpu [bad-request]")


# --- reservations of a resource that policy no longer names ------------------------------------------------------

FRACTION = AllocatedDevice("fraction-uid-train", uuid(0))
THEIRS, EARLIER, REPLICATED, MIG = (
    AllocatedDevice(resource, uuid(0)) for resource in (GPU, OURS, f"{GPU}.shared", "nvidia.com/mig-1g.5gb")
)
NAMED: dict[str, tuple[KubeletSettings, set[AllocatedDevice]]] = {
    "our own": (SERVED, {THEIRS}),
    "another name": (replace(SERVED, resource=OURS), {EARLIER}),
    "renamed": (replace(TWICE, rename=True), {THEIRS, REPLICATED}),
    "MIG devices": (replace(SERVED, mig_strategy=MigStrategy.MIXED), {THEIRS, MIG}),
    "no device plugin": (KubeletSettings(), set()),
    "another's": (KubeletSettings(inject_for=Globs((GPU,))), {THEIRS}),
    "a scheduler of fractions": (KubeletSettings(reservations=Globs(("kai",))), {FRACTION}),
}


@pytest.mark.parametrize(("settings", "stay"), NAMED.values(), ids=NAMED)
def test_what_policy_no_longer_names_is_reserved_for_nobody(
    settings: KubeletSettings, stay: set[AllocatedDevice]
) -> None:
    every = [THEIRS, EARLIER, REPLICATED, MIG, FRACTION]
    ledger = after(Ledger(), DevicesAllocated(0.0, tuple(every)))
    assert without_unnamed(ledger, settings).reservations.keys() == stay


def test_podresources_tells_of_the_end_of_a_resource_that_policy_no_longer_names() -> None:
    node = ExternalNode(SERVED)
    of = running(node, given(node, 0))
    renamed = replace(SERVED, resource=OURS)
    node.policy, node.settings = replace(node.policy, kubelet=renamed), renamed
    node.restarted({of.id: (of, True)})
    node.lists(of, [uuid(0)])
    node.stop(of)
    node.clock.now += SETTLED_S
    node.list_all()
    assert reservations(node) == 1  # its pod is still there, and comes again with our answer
    assert node.create(again(of)) == (uuid(0),)
    node.end_pod(of)  # before Kubernetes 1.34 pods that are over are listed, too
    node.list_all()
    node.clock.now += SETTLED_S
    node.list_all()
    assert node.create(container("device=0", of="local")) == (uuid(0),)


def test_what_another_plugin_allocates_replaces_what_a_pod_had_that_is_over() -> None:
    """Two resources for the same GPUs: the kubelet's newer word is about a pod that is there."""
    node = ExternalNode(INJECTING)
    first = from_kubelet(node.allocate(uuid(0), resource=OURS), pod="first")
    running(node, first)
    node.stop(first)
    next_ = of_plugin(0, pod="next")
    node.admitted(next_, [uuid(0)])
    assert "held exclusively by ml/first" in str(node.create(next_))
    node.end_pod(first)
    assert node.create(next_) == (uuid(0),)
