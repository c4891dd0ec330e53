"""What the kubelet gave stays its pod's while that may come for it, and no longer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.reservations import OPEN_S
from nri_gpu.decision.replay import Replay
from nri_gpu.domain.codec import encode
from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.kubelet import AllocatedDevice
from nri_gpu.policy.model import LedgerSettings, Policy
from tests.support import builders
from tests.support.builders import container, gpu, uuid
from tests.unit.kubelet.station import GPU, Halves, again, from_kubelet

GRACE_S = 61.0


def given(halves: Halves, *indices: int, pod: str = "train", name: str = "main") -> Container:
    """A container that the kubelet has just allocated for."""
    annotations = halves.allocate(*(uuid(index) for index in indices))
    return from_kubelet(annotations, pod=pod, name=name)


def running(halves: Halves, of: Container) -> Container:
    assert isinstance(halves.create(of), tuple)
    assert halves.start(of)
    return of


def remade(of: Container) -> Container:
    """Its pod's next container, in a sandbox made anew."""
    return replace(again(of), pod=replace(of.pod, id=PodId(f"{of.pod.id}-anew")))


def removed(halves: Halves, of: Container) -> None:
    halves.event(pb.REMOVE_CONTAINER, of)


def promises(halves: Halves) -> int:
    return len(halves.plugin.ledger.reservations)


def test_one_that_never_started_finds_its_gpu_at_its_next_attempt() -> None:
    """A start that fails inside runc sends no event, and the kubelet waits for up to 5 minutes before the next."""
    halves = Halves()
    first = given(halves, 0)
    assert halves.create(first) == (uuid(0),)
    halves.clock.now += GRACE_S
    assert "held exclusively by ml/train" in str(halves.create(container("device=0", of="thief")))
    assert halves.create(again(first)) == (uuid(0),)


@pytest.mark.parametrize("grace_s", [GRACE_S, 3600])
def test_what_nobody_comes_for_is_free_after_a_quarter_of_an_hour(grace_s: int) -> None:
    halves = Halves()
    halves.plugin.state.policy = Policy(ledger=LedgerSettings(created_grace_s=grace_s))
    given(halves, 0)
    halves.clock.now += OPEN_S - 1
    assert "held exclusively by" in str(halves.create(container("device=0", of="local")))
    halves.clock.now += 2
    assert halves.create(container("device=0", of="local")) == (uuid(0),)


def test_a_lapsed_grant_is_no_promise_for_life() -> None:
    halves = Halves()
    never = given(halves, 0)
    halves.create(never)
    halves.clock.now += GRACE_S
    halves.plugin.lapse()
    halves.clock.now += OPEN_S + GRACE_S
    local = running(halves, container("device=0", of="local"))
    removed(halves, never)
    halves.stop(local)
    assert halves.create(again(local)) == (uuid(0),)
    assert not promises(halves)


def test_a_lapsed_one_may_start_late_and_is_held_once() -> None:
    halves = Halves()
    late = given(halves, 0)
    halves.create(late)
    halves.clock.now += GRACE_S
    halves.plugin.lapse()
    assert promises(halves) == 1
    assert halves.start(late)
    assert not promises(halves)
    halves.stop(late)
    assert promises(halves) == 1


def test_a_created_one_that_is_stopped_and_removed_leaves_one_promise() -> None:
    halves = Halves()
    of = given(halves, 0)
    halves.create(of)
    halves.stop(of)
    removed(halves, of)
    assert promises(halves) == 1
    assert halves.create(again(of)) == (uuid(0),)


def test_a_sandbox_made_anew_finds_the_pods_gpus() -> None:
    """The kubelet's grant is the pod's, and its checkpoint replays it; the sandbox is the runtime's matter."""
    halves = Halves()
    of = running(halves, given(halves, 0))
    halves.stop(of)
    halves.end_pod(of)
    assert "ml/train" in str(halves.create(container("device=0", of="thief")))
    assert not any(device.why for device in halves.offers.devices(GPU))
    second = running(halves, remade(of))
    halves.event(pb.REMOVE_POD_SANDBOX, of)  # the old one's, late
    halves.stop(second)
    assert "ml/train" in str(halves.create(container("device=0", of="thief")))
    assert halves.create(again(second, 2)) == (uuid(0),)


def test_a_sandbox_that_goes_before_its_container_says_so() -> None:
    halves = Halves()
    of = running(halves, given(halves, 0))
    halves.end_pod(of)
    assert promises(halves) == 1
    assert halves.create(remade(of)) == (uuid(0),)


def test_a_pod_that_is_over_keeps_its_gpus_for_a_while_from_annotations_only() -> None:
    halves = Halves()
    of = running(halves, given(halves, 0, 1))
    halves.stop(of)
    halves.end_pod(of)
    assert running(halves, given(halves, 0, pod="next"))  # the kubelet's word about an id
    halves.clock.now += OPEN_S
    halves.event(pb.REMOVE_POD_SANDBOX, of)  # does not begin it anew
    halves.clock.now += GRACE_S
    assert halves.create(container("device=1", of="local")) == (uuid(1),)


def test_a_later_word_of_the_kubelets_outlasts_the_end_of_the_one_before() -> None:
    halves = Halves()
    first = running(halves, given(halves, 0))
    halves.clock.now += OPEN_S
    second = given(halves, 0, pod="next")
    halves.stop(first)
    halves.end_pod(first)
    assert halves.create(second) == (uuid(0),)


def test_a_promise_that_lapsed_is_in_nobodys_way() -> None:
    halves = Halves()
    old = running(halves, given(halves, 0, pod="old"))
    halves.stop(old)
    halves.end_pod(old)
    halves.clock.now += OPEN_S + GRACE_S
    halves.plugin.lapse()
    new = running(halves, from_kubelet(old.annotations, pod="new"))  # the kubelet's checkpoint, and a daemon without it
    halves.stop(new)
    assert "ml/new" in str(halves.create(container("device=0", of="thief")))


def alive(halves: Halves, of: Container) -> Container:
    """As the runtime shows it to a daemon that comes later."""
    return replace(of, annotations={**of.annotations, **halves.marks[of.id]})


def without_key(halves: Halves, *containers: Container) -> None:
    """A daemon that has not read the key yet, and the runtime's list."""
    halves.restart_daemon()
    halves.plugin.kubelet.key, halves.plugin.kubelet.awaited = None, True
    halves.relist([(each, True) for each in containers])


def test_a_key_that_comes_late_tells_whose_containers_there_are() -> None:
    halves = Halves()
    of = running(halves, given(halves, 0))
    without_key(halves, of)
    assert all(device.why for device in halves.offers.devices(GPU))
    halves.keyed()
    assert not any(device.why for device in halves.offers.devices(GPU))
    halves.stop(of)
    assert "ml/train" in str(halves.create(container("device=0", of="thief")))


def test_a_key_that_comes_late_vouches_for_no_forgery_and_nothing_that_is_over() -> None:
    halves = Halves()
    over, local = running(halves, given(halves, 0)), running(halves, container("device=1", of="local"))
    forger = replace(local, annotations={key: "v1" for key in over.annotations})
    without_key(halves, over, forger)
    halves.stop(over)
    halves.keyed()
    assert [bool(device.why) for device in halves.offers.devices(GPU)] == [False, True, False, False]
    assert halves.create(container("device=0", of="next")) == (uuid(0),)


def test_a_key_that_comes_late_is_asked_of_one_that_no_list_had() -> None:
    halves = Halves()
    of = given(halves, 0)
    halves.create(of)
    without_key(halves)
    assert halves.start(alive(halves, of))
    halves.keyed()
    assert not any(device.why for device in halves.offers.devices(GPU))


def test_containers_of_one_pod_each_have_their_own() -> None:
    halves = Halves()
    first, second = (
        from_kubelet(halves.allocate(*ids), id=builders.container(name=name).id + name, name=name)
        for name, ids in (("one", [uuid(0)]), ("two", [uuid(1), uuid(2)]))
    )
    running(halves, first)
    assert "kubelet/nvidia.com/gpu" in str(halves.create(container("device=1", of="thief")))
    running(halves, second)
    halves.stop(first)
    assert promises(halves) == len(halves.plugin.ledger.entries) == 1
    assert "ml/train" in str(halves.create(container("device=0", of="thief")))
    assert halves.create(again(first)) == (uuid(0),)


def test_an_init_containers_gpus_are_taken_over_by_the_next_container_of_its_pod() -> None:
    """The kubelet offers finished init containers' ids again first, and then asks Allocate for them anew."""
    halves = Halves()
    init = running(halves, given(halves, 0, name="init"))
    halves.stop(init)
    main = given(halves, 0, 1, name="main")
    main = replace(main, id=again(main).id)
    assert halves.create(main) == (uuid(0), uuid(1))


def test_a_restartable_init_container_keeps_its_own_beside_the_main_one() -> None:
    halves = Halves()
    sidecar = running(halves, given(halves, 0, name="proxy"))
    main = given(halves, 1, name="main")
    main = running(halves, replace(main, id=again(main).id))
    for each, held in ((sidecar, (uuid(0),)), (main, (uuid(1),))):
        halves.stop(each)
        assert halves.create(again(each, 7)) == held
        halves.start(again(each, 7))


def test_ill_gpus_do_not_undo_what_was_promised() -> None:
    halves = Halves()
    of = given(halves, 0)
    halves.put_gpus([gpu(0, unavailable="lost"), gpu(1)])
    assert "gpu-unavailable" in str(halves.create(of))
    halves.put_gpus([gpu(0), gpu(1)])
    assert "kubelet/nvidia.com/gpu" in str(halves.create(container("device=0", of="thief")))
    assert halves.create(again(of)) == (uuid(0),)


def test_an_older_audit_log_lists_reservations_among_the_grants() -> None:
    id_ = ContainerId(f"kubelet/{GPU}={uuid(0)}")
    grant = replace(builders.entry(0).grant, container_id=id_, pod_uid=PodUid("kubelet"))
    entry = {"grant": encode(grant), "phase": "created", "since": 5.0, "until": "inf"}
    record = {"kind": "ledger", "entries": {grant.container_id: entry}, "foreign": {}, "leaving": {}}
    replay = Replay(lambda _, __: Policy())
    replay.take(record)
    device = AllocatedDevice(GPU, uuid(0))
    assert not replay.ledger.entries
    assert replay.ledger.reservations[device].until is None
    replay.take({"kind": "changed", "entries": {grant.container_id: None}, "foreign": {}})
    assert not replay.ledger.reservations
