"""How long the kubelet's allocations hold: before a container, between two of one pod, after the pod, without a key."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, PodId
from nri_gpu.ledger.ledger import GrantPhase
from nri_gpu.ledger.recording import Remembered
from nri_gpu.ledger.reservations import OPEN_S
from nri_gpu.policy.model import LedgerSettings, Policy
from nri_gpu.policy.read import parse_policy
from tests.support import builders
from tests.support.builders import container, uuid
from tests.support.kubelet_nodes import GPU, PluginNode, again, from_kubelet

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
    assert "not offered here" in str(node.create(container("device=0", of="more")))
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
