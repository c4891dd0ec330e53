"""Other device plugins allocate, we inject: only what PodResources lists, and never more of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.holds import holds_of
from nri_gpu.ledger.reservations import SETTLED_S
from nri_gpu.nri.convert import EMPTY
from nri_gpu.plugin.guard import Guard
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import EnvironmentSettings, Policy
from nri_gpu.records.ledger_file import read_ledger, write_ledger
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE
from nri_gpu.ttrpc.frames import Status
from tests.support import builders
from tests.support.builders import container, gpu, held_node, mig_gpu, mig_uuid, pod, uuid
from tests.support.kubelet_nodes import (
    GPU,
    OURS,
    RESERVED,
    SHARING,
    ExternalNode,
    from_kubelet,
    of_plugin,
    reply_of,
    token,
)
from tests.support.log import Log
from tests.support.plugin import KEY

REPLICAS = [f"{uuid(1)}::0", f"{uuid(1)}::3"]


@pytest.fixture
def node() -> ExternalNode:
    return ExternalNode()


def granted(node: ExternalNode, of: Container, *indices: int, resource: str = GPU) -> Container:
    """Admitted with these GPUs, and created with them, though it asks twice."""
    ids = tuple(map(uuid, indices))
    node.admitted(of, ids, resource)
    assert node.create(of) == node.create(of) == ids
    return of


def says(value: str, *mounted: str) -> Container:
    """A container with this variable, and with these names below the folder of mounted names."""
    return of_plugin(
        env={VARIABLE: value}, mounts=frozenset({f"{MOUNTED_NAMES}/{each}" for each in mounted} | {"/data"})
    )


# What a container says to which the kubelet gave GPU 1.
SAYS = {
    "its uuid": (says(uuid(1)), (uuid(1),)),
    "its index": (says("1"), (uuid(1),)),
    "nothing": (of_plugin(env={}), (uuid(1),)),
    "a mount": (says(MOUNTED_NAMES, uuid(1)), (uuid(1),)),
    "a CDI name": (says(f"k8s.device-plugin.nvidia.com/gpu={uuid(1)}"), (uuid(1),)),
    # CUDA images say `all`; the runtime puts the kubelet's behind it, and that is what programs see.
    "all, of the image, and its uuid": (of_plugin(1, env_twice=frozenset({VARIABLE})), (uuid(1),)),
    "void": (says("void"), ()),
    "none": (says("none"), ()),
    "an empty variable": (says(""), ()),
    "another uuid": (says(uuid(0)), "refused"),
    "one uuid more": (says(f"{uuid(1)},{uuid(0)}"), "refused"),
    "all": (says("all"), "refused"),
    "another index": (says("0"), "refused"),
    "an index of none": (says("9"), "refused"),
    "a mount of another": (says(MOUNTED_NAMES, uuid(0)), "refused"),
    "no mount": (says(MOUNTED_NAMES), "refused"),
}


@pytest.mark.parametrize(("of", "gets"), SAYS.values(), ids=SAYS)
def test_the_variable_has_to_agree_with_the_kubelet(node: ExternalNode, of: Container, gets: object) -> None:
    node.admitted(of, [uuid(1)])
    got = node.create(of)
    if isinstance(got, str):
        assert got.startswith(f"nri-gpu [bad-request]: {VARIABLE}: it says")
        assert uuid(1) in got
        got = "refused"
    assert got == gets


@pytest.mark.parametrize("written", [mig_uuid(0, 1), "0:1"])
def test_mig_devices_by_uuid_and_by_index(node: ExternalNode, written: str) -> None:
    node.put_gpus([mig_gpu(0), gpu(1)])
    of = of_plugin(env={VARIABLE: written})
    node.admitted(of, [mig_uuid(0, 1)], "nvidia.com/mig-1g.5gb")
    assert node.create(of) == (mig_uuid(0, 1),)


def test_replicas_are_shared(node: ExternalNode) -> None:
    for number, id_ in enumerate(REPLICAS):
        of = of_plugin(1, pod=f"shares-{number}", claim="all;mode=shared;capabilities=utility")
        node.admitted(of, [id_])
        assert node.create(of) == (uuid(1),)
    assert node.plugin.ledger.usage()[uuid(1)].mode == "shared"
    alone = of_plugin(2, pod="alone", claim="all;mode=shared")
    node.admitted(alone, [uuid(2)])
    assert "kubelet allocated in exclusive mode" in str(node.create(alone))


def test_a_variable_that_the_kubelet_did_not_write_is_no_grant_in_may_ask_either(node: ExternalNode) -> None:
    node.plugin.state.use(replace(node.policy, environment=EnvironmentSettings(may_ask=Globs(("*",)))))
    of = of_plugin(1)
    node.admitted(of, [])
    assert node.create(of) == ()


def test_an_init_container_which_the_kubelet_does_not_list(node: ExternalNode) -> None:
    """It makes an init container's devices those of later containers, and lists them there."""
    main = of_plugin(1, 2)
    node.admitted(main, [uuid(1), uuid(2)])
    assert node.create(replace(main, id=ContainerId("train.init"), name="init", env={VARIABLE: uuid(1)})) == (uuid(1),)
    beyond = replace(main, id=ContainerId("train.init2"), name="init2", env={VARIABLE: f"{uuid(1)},{uuid(0)}"})
    assert "it says" in str(node.create(beyond))
    other = replace(main, id=ContainerId("train.init3"), name="init3", env={VARIABLE: uuid(0)})
    assert node.create(other) == ()


def test_before_the_kubelet_told_it_is_refused_and_asked(node: ExternalNode) -> None:
    of = of_plugin(1)
    node.lists(of, [uuid(1)])
    node.sandbox_created(of)
    refused = str(node.create(of))
    assert refused.startswith(f"nri-gpu [node-not-ready]: {VARIABLE}: ")
    assert "will be tried again" in refused
    node.answer()
    assert node.create(of) == (uuid(1),)
    late = of_plugin(2, pod="before-us")  # its sandbox was there before the daemon was
    node.lists(late, [uuid(2)])
    assert "[node-not-ready]" in str(node.create(late))
    node.answer()
    assert node.create(late) == (uuid(2),)
    plain = container(of="plain", env={VARIABLE: "all"})
    assert node.create(plain) == ()  # no device plugin wrote that


def test_a_pod_that_the_kubelet_does_not_know_is_none_that_it_gave_nothing(node: ExternalNode) -> None:
    """It was restarted perhaps, and will know it soon; so it is asked again."""
    of = of_plugin(1)
    node.sandbox_created(of)
    node.pods.questions.clear()
    node.list_all()
    assert "the kubelet knows of no such pod" in str(node.create(of))
    node.lists(of, [uuid(1)])
    node.answer()
    assert node.create(of) == (uuid(1),)


def test_without_podresources_nobody_starts_without_its_gpus(node: ExternalNode) -> None:
    node.plugin.external.pods = None
    refused = str(node.create(of_plugin(1)))
    assert "[node-not-ready]" in refused
    assert "kubelet.podresources is empty" in refused
    assert node.create(container("1", of="by-annotation")) == (uuid(0),)


def test_one_name_and_another_pod(node: ExternalNode) -> None:
    """An answer is the sandbox's that was there: a StatefulSet's next pod of that name has to be asked about anew."""
    granted(node, of_plugin(1), 1)
    stale = node.pods.all()
    anew = replace(pod("train"), id=PodId("sandbox-2"), uid=PodUid("uid-2"))
    second = replace(of_plugin(1), id=ContainerId("second"), pod=anew)
    node.sandbox_created(second)
    assert "[node-not-ready]" in str(node.create(second))
    node.pods.put(stale[0], node.listed["ml", "train"])  # late, and of the first
    assert "[node-not-ready]" in str(node.create(second))


def test_two_pods_of_one_name_are_no_answer(node: ExternalNode) -> None:
    of = of_plugin(1)
    node.lists(of, [uuid(1)])
    node.sandbox_created(of)
    given = node.listed["ml", "train"]
    node.pods.put_list(node.pods.all(), (given, given))
    assert "[node-not-ready]" in str(node.create(of))


SERVED = {
    "a CDI device": {"cdi_devices": ("k8s.device-plugin.nvidia.com/gpu=x",)},
    "a DRA driver's claim": {
        "cdi_devices": ("k8s.gpu.nvidia.com/claim=c-gpu-0",),
        "devices": (held_node(gpu(1)),),
        "env": {},
    },
    "nodes": {"devices": (held_node(gpu(1)),)},
    "hooks": {"nvidia_hooks": frozenset({"nvidia-cdi-hook"})},
}


@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_whom_others_inject_is_left_to_them(node: ExternalNode, fields: dict[str, object]) -> None:
    of = replace(of_plugin(1), **fields)
    node.admitted(of, [uuid(1)])
    assert node.plugin.create_container(builders.create_payload(of)) == EMPTY
    assert node.start(of)
    if of.devices:
        assert node.plugin.ledger.usage()[uuid(1)].external
        assert "[gpu-busy]" in str(node.create(container("device=1", of="thief")))


def test_no_two_hands_on_one_container(node: ExternalNode) -> None:
    of = replace(from_kubelet(token(0)), env={VARIABLE: uuid(1)})
    node.admitted(of, [uuid(0)], GPU)
    assert "of nri-gpu's own resource and of another" in str(node.create(of))


def test_what_they_gave_before_any_container_is_held(node: ExternalNode) -> None:
    of = of_plugin(1, pod="pulls-its-image")
    node.lists(of, [uuid(1)])
    node.sandbox_created(of)
    node.list_all()
    assert "ml/pulls-its-image" in str(node.create(container("device=1", of="thief")))
    assert [device.id for device in node.devices.devices(OURS) if device.why] == [uuid(1)]
    assert node.create(of) == (uuid(1),)
    assert len(node.plugin.ledger.entries) == 1
    assert not node.plugin.ledger.reservations  # the reservation became the grant


def test_one_that_lapsed_and_started_after_all_leaves_it_to_its_pod(node: ExternalNode) -> None:
    of = granted(node, of_plugin(1), 1)
    node.clock.now += 61
    node.plugin.lapse()
    assert node.start(of)
    assert not node.plugin.ledger.reservations
    node.stop(of)
    assert "held exclusively by ml/train" in str(node.create(container("device=1", of="thief")))


def test_reservations_end_when_the_kubelet_lists_them_no_more(node: ExternalNode) -> None:
    of = of_plugin(1)
    node.lists(of, [uuid(1)])
    node.list_all()
    node.listed.clear()
    node.list_all()
    assert node.plugin.ledger.usage().keys() == {uuid(1)}  # once missing is not gone
    node.clock.now += SETTLED_S
    node.list_all()
    assert not node.plugin.ledger.usage()


def test_a_pod_that_is_over_leaves_its_gpu_to_be_looked_at(node: ExternalNode) -> None:
    """Finished, and its sandbox still there: nobody but the kubelet's list tells."""
    node.put_gpus([gpu(index, processes=0) for index in range(4)], simulated=False)
    of = of_plugin(1)
    granted(node, of, 1)
    assert node.start(of)
    node.stop(of)
    node.listed.clear()
    for _ in range(2):
        node.list_all()
        node.clock.now += SETTLED_S
    assert "ml/train" in str(node.create(container("device=1", of="next")))
    node.plugin.looked(node.node.inventory, node.clock.now)
    assert node.create(container("device=1", of="next")) == (uuid(1),)


def test_an_allocation_that_nobody_lists_ends_early_and_one_that_is_listed_does_not_lapse(node: ExternalNode) -> None:
    node.allocate(uuid(0), resource=OURS)
    annotations = node.allocate(uuid(1), resource=OURS)
    slow = from_kubelet(annotations, pod="slow")
    node.lists(slow, [uuid(1)], OURS)
    node.list_all()
    node.clock.now += SETTLED_S
    node.list_all()
    assert node.plugin.ledger.usage().keys() == {uuid(1)}
    assert node.plugin.ledger.usage()[uuid(1)].pods == {PodUid("kubelet"): "ml/slow"}
    node.clock.now += 10_000
    node.plugin.lapse()
    assert "ml/slow" in str(node.create(container("device=1", of="thief")))
    node.sandbox_created(slow)
    node.answer()
    assert node.create(slow) == (uuid(1),)


def test_a_finished_pod_that_an_old_kubelet_lists_is_in_nobodys_way(node: ExternalNode) -> None:
    done, fresh = granted(node, of_plugin(1, pod="done"), 1), of_plugin(1, pod="anew")
    node.end_pod(done)  # its sandbox is stopped; the pod is there until somebody deletes it
    node.admitted(fresh, [uuid(1)])
    for _ in range(2):
        node.list_all()
        assert node.plugin.ledger.usage()[uuid(1)].pods == {fresh.pod.uid: "ml/anew"}
    assert node.create(fresh) == (uuid(1),)
    node.list_all()
    assert len(node.plugin.ledger.usage()[uuid(1)].holders) == 1


def test_a_daemon_that_starts_anew_hears_what_it_forgot(node: ExternalNode) -> None:
    external, ours = of_plugin(1, pod="external"), from_kubelet({}, pod="ours")
    annotations = node.allocate(uuid(2), resource=OURS)
    node.lists(external, [uuid(1)])
    node.lists(ours, [uuid(2)], OURS)
    node.restart_daemon()
    assert not node.plugin.ledger.usage()
    node.list_all()
    assert node.plugin.ledger.usage().keys() == {uuid(1), uuid(2)}
    local = container("2", of="local")
    node.sandbox_created(local)
    node.answer()
    assert node.create(local) == (uuid(0), uuid(3))
    assert [d.id for d in node.devices.devices(OURS) if not d.why] == [uuid(2)]
    node.sandbox_created(external)
    node.answer()
    assert node.create(external) == (uuid(1),)
    assert node.create(replace(ours, annotations=annotations)) == (uuid(2),)


def test_before_the_first_list_no_annotation_takes_what_the_kubelet_may_have_given(node: ExternalNode) -> None:
    node.pods.settled = False
    local = container("device=1", of="local")
    assert "has just started" in str(node.create(local))
    assert node.create(container(of="plain")) == ()
    node.lists(of_plugin(1), [uuid(1)])
    node.list_all()
    assert "[gpu-busy]" in str(node.create(local))


def test_a_daemon_that_starts_anew_knows_whose_grants_were_the_kubelets(node: ExternalNode) -> None:
    external = granted(node, of_plugin(1, pod="external"), 1)
    assert node.start(external)
    node.restarted({external.id: (external, True)})
    node.list_all()
    assert [d.id for d in node.devices.devices(OURS) if d.why] == [uuid(1)]
    node.stop(external)
    assert "[gpu-busy]" in str(node.create(container("device=1", of="thief")))


def test_a_token_holds_until_the_kubelet_says_otherwise(log: Log) -> None:
    node = ExternalNode(KubeletSettings(enabled=True))
    of = from_kubelet(token(0))
    assert node.create(of) == (uuid(0),)  # not told yet is no refusal
    node.lists(replace(of, name="sidecar"), [])
    node.answer()
    assert node.create(of) == (uuid(0),)  # nor is a container that the kubelet does not list
    node.pod_deleted(of)

    copied = from_kubelet(token(1), pod="copied")
    node.admitted(copied, [])
    for _ in range(3):
        refused = str(node.create(copied))
        assert refused.startswith("nri-gpu [bad-request]: gpu.nri.io/kubelet: the kubelet says that it allocated")
        assert "none of nvidia.com/gpu" in refused
    assert "copied from another container" in log.one("kubelet allocation not valid").fields["fault"]

    less = from_kubelet(token(1, 2), pod="less")
    node.admitted(less, [uuid(1)])
    assert f"and not {uuid(1)}, {uuid(2)}" in str(node.create(less))
    granted(node, from_kubelet(token(2, 1), pod="same"), 1, 2)


def fraction(group: str, index: int = 1, name: str = "half") -> Container:
    return replace(of_plugin(index), id=ContainerId(name), pod=pod(name, labels={"runai-gpu-group": group}))


def reservation(group: str, namespace: str = RESERVED, index: int = 1) -> Container:
    labels = {"runai-gpu-group": group, "app": RESERVED}
    return replace(
        of_plugin(index),
        id=ContainerId(f"holds-{group}"),
        pod=pod(f"gpu-reservation-{group}", namespace=namespace, labels=labels),
    )


def test_a_reservation_that_is_gone_is_shared_no_more() -> None:
    node = ExternalNode(SHARING)
    granted(node, reservation("g1"), 1)
    assert node.create(fraction("g1")) == (uuid(1),)
    node.pod_deleted(reservation("g1"))
    assert "[node-not-ready]" in str(node.create(fraction("g1", name="late")))


PARTS: dict[str, tuple[dict[str, str], float]] = {
    "a part of it": ({"gpu-fraction": "0.25"}, 0.25),
    "some of its memory": ({"gpu-memory": "20480"}, 0.5),
    "all": ({"gpu-fraction": "1"}, 1.0),
    "nothing": ({}, 1.0),
    "no number": ({"gpu-fraction": "half"}, 1.0),
    "not a number": ({"gpu-fraction": "nan"}, 1.0),
    "less than none": ({"gpu-memory": "-4"}, 1.0),
    "more than it has": ({"gpu-memory": "9" * 400}, 1.0),
}


@pytest.mark.parametrize(("annotations", "part"), PARTS.values(), ids=PARTS)
def test_a_fraction_is_held_by_the_part_that_its_pod_asked_for(annotations: dict[str, str], part: float) -> None:
    node = ExternalNode(SHARING)
    granted(node, reservation("g1"), 1)
    half = fraction("g1")
    half = replace(half, pod=replace(half.pod, annotations=annotations))
    assert node.create(half) == (uuid(1),)
    held = {hold.pod: hold.part for hold in holds_of(node.plugin.ledger).values()}
    assert held == {"half": part, "gpu-reservation-g1": 1.0}


ONE, OTHER = reservation("g1"), reservation("g2", index=3)
BOTH = pod("both", labels={"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"})
FRACTIONS = {
    "parts of two GPUs": ([ONE, OTHER], replace(of_plugin(1, 3), pod=BOTH), True),
    "a GPU that nobody reserved": ([ONE, OTHER], fraction("g1", 2), False),
    "a GPU of another group": ([ONE, OTHER], fraction("g2", 1), False),
    "a group of nobody": ([ONE, OTHER], fraction("g9", 1), False),
    "a reservation in another namespace": ([reservation("g1", namespace="ml")], fraction("g1"), False),
}


@pytest.mark.parametrize(("reserved", "of", "shares"), FRACTIONS.values(), ids=FRACTIONS)
def test_only_the_groups_own_reservation_is_shared(reserved: list[Container], of: Container, shares: bool) -> None:
    node = ExternalNode(SHARING)
    for holder in reserved:
        node.admitted(holder, [holder.env[VARIABLE]])
    got = node.create(of)
    if shares:
        assert got == (uuid(1), uuid(3))
    else:
        assert str(got).startswith("nri-gpu [node-not-ready]")
        assert "no pod in the namespaces of kubelet.reservations holds" in got


def test_a_group_without_the_setting_is_nothing(node: ExternalNode) -> None:
    node.admitted(reservation("g1"), [uuid(1)])
    of = fraction("g1")
    node.admitted(of, [])
    assert node.create(of) == ()
    alone = ExternalNode(KubeletSettings(reservations=Globs((RESERVED,))))  # nor is a pod without a group a fraction
    assert alone.plugin.create_container(builders.create_payload(of_plugin(1))) == EMPTY
    assert alone.start(of_plugin(1))


def test_reservations_by_our_own_device_plugin() -> None:
    node = ExternalNode(KubeletSettings(enabled=True, reservations=Globs((RESERVED,))))
    annotations = node.allocate(uuid(1))
    holder = replace(reservation("g1"), annotations=annotations, env={})
    granted(node, holder, 1)
    of = fraction("g1")
    node.admitted(of, [])
    assert node.create(of) == (uuid(1),)
    assert node.start(of)
    assert not [device.id for device in node.devices.devices(GPU) if device.why]  # it is the kubelet's still
    node.restarted({of.id: (of, True), holder.id: (holder, True)})
    node.list_all()
    assert not [device.id for device in node.devices.devices(GPU) if device.why]


@pytest.mark.parametrize("claim", ["device=1", "device=1;mode=shared"])
def test_a_group_of_a_tenants_own_makes_no_held_gpu_look_free(claim: str) -> None:
    node = ExternalNode(KubeletSettings(enabled=True, reservations=Globs((RESERVED,))))
    of = container(of=pod("tenant", claim, labels={"runai-gpu-group": "g1"}))
    node.admitted(of, [])
    assert node.create(of) == (uuid(1),)
    assert node.taken() == {uuid(1)}
    node.restarted({of.id: (of, True)})
    node.list_all()
    assert node.taken() == {uuid(1)}


def test_nor_does_a_variable_that_names_what_the_kubelet_did_not_allocate() -> None:
    node = ExternalNode(SHARING)
    of = of_plugin(1, claim="device=1")
    node.admitted(of, [])
    assert node.create(of) == (uuid(1),)
    assert node.taken() == {uuid(1)}


def test_a_fraction_is_of_a_reservation_that_has_the_kubelets_devices() -> None:
    node = ExternalNode(KubeletSettings(enabled=True, reservations=Globs((RESERVED,))))
    labels = {"runai-gpu-group": "g1"}
    by_annotation = container(of=pod("own", "device=1;mode=shared", namespace=RESERVED, labels=labels))
    node.admitted(by_annotation, [])
    assert node.create(by_annotation) == (uuid(1),)
    node.restarted({by_annotation.id: (by_annotation, True)})
    assert node.taken() == {uuid(1)}


class Keyed(NamedTuple):
    """What the guard reads."""

    key: Callable[[], bytes]
    policy: Callable[[], Policy]
    revoked: Callable[[], Collection[ContainerId]] = tuple


@pytest.fixture
def guard(node: ExternalNode) -> Guard:
    return Guard(Keyed(lambda: KEY, lambda: node.policy), lambda action: action())


def test_created_while_we_were_away_it_does_not_start(node: ExternalNode, guard: Guard) -> None:
    of = of_plugin(1)
    start = builders.event_payload(pb.START_CONTAINER, of)
    for refused in (node.plugin.lifecycle(start), guard.lifecycle(start)):
        assert isinstance(refused, Status)
        assert "[not-granted]" in refused.message
    # One that runs already may have been served by NVIDIA's runtime, and is no business of ours.
    node.restarted({})
    assert not node.plugin.ungranted
    for served in (of_plugin(env={VARIABLE: "all"}), of_plugin(1, devices=(held_node(gpu(1)),)), container()):
        assert guard.lifecycle(builders.event_payload(pb.START_CONTAINER, served)) == EMPTY


def test_whoever_was_decided_on_may_start_past_the_guard(node: ExternalNode, guard: Guard) -> None:
    for number, ids in enumerate(([uuid(1)], [])):
        of = of_plugin(1, pod=f"pod-{number}")
        node.admitted(of, ids)
        reply = reply_of(node, of)
        shown = replace(of, annotations=dict(reply.adjust.annotations))
        assert guard.lifecycle(builders.event_payload(pb.START_CONTAINER, shown)) == EMPTY


def test_many_sandboxes_are_bounded(node: ExternalNode) -> None:
    for number in range(3000):
        node.sandbox_created(pod(f"pod-{number}"))
    assert len(node.pods.all()) <= 1024


# --- claims that NVIDIA's DRA driver prepared ---

ODD = "of gpu.nvidia.com that this node does not have"
THEIRS = container(of="theirs")


def prepared(node: ExternalNode, *devices: str, pool: str = "node1") -> None:
    """The kubelet prepared them, and its sandbox is made: no container of it is there."""
    node.prepares(THEIRS, *devices, pool=pool)
    node.sandbox_created(THEIRS)
    node.answer()


def over(node: ExternalNode) -> None:
    """The kubelet lists no more what it did, for a while."""
    node.clock.now += SETTLED_S
    node.list_all()


def asks(node: ExternalNode, claim: str, of: str = "train") -> tuple[GpuUuid, ...] | str:
    """What a pod without limits is granted by annotation, or why not."""
    made = container(claim, of=of)
    node.admitted(made, ())
    return node.create(made)


def test_a_prepared_device_is_held_from_all_ways_before_its_container_comes(node: ExternalNode) -> None:
    """By the answer about its sandbox: a List may be ten seconds away."""
    prepared(node, "gpu-6")  # minor 6 is GPU 1
    assert node.taken() == {uuid(1)}
    assert "ml/theirs (by a claim of gpu.nvidia.com, gpu-6)" in asks(node, "device=1")
    assert set(asks(node, "3", of="others")) == {uuid(0), uuid(2), uuid(3)}
    node.pod_deleted(THEIRS)
    over(node)
    assert asks(node, "device=1", of="next") == (uuid(1),)


def test_a_sandbox_that_is_made_anew_finds_its_prepared_device(node: ExternalNode) -> None:
    """Nobody has it in between: the kubelet prepares a claim once, whatever becomes of the sandbox."""
    prepared(node, "gpu-6")
    node.end_pod(THEIRS)
    assert "[gpu-busy]" in asks(node, "device=1")
    node.list_all()
    assert "[gpu-busy]" in asks(node, "device=1", of="another")


def test_a_prepared_device_that_is_listed_no_more_is_free_after_a_while(node: ExternalNode) -> None:
    prepared(node, "gpu-6")
    node.listed.clear()
    node.list_all()
    assert node.taken() == {uuid(1)}
    over(node)
    assert node.taken() == set()


def test_only_this_nodes_pool_counts_once_its_name_is_known(node: ExternalNode, log: Log) -> None:
    prepared(node, "gpu-6", pool="node2")
    assert node.taken() == {uuid(1)}
    node.pod_deleted(THEIRS)
    over(node)
    node.plugin.external.node = "node1"
    prepared(node, "gpu-6", pool="node2")
    assert node.taken() == set()
    node.list_all()
    (warned,) = log.warnings()
    assert (ODD in warned.text, warned.fields["fault"]) == (True, "node2/gpu-6")


@pytest.mark.parametrize("device", ["gpu-six", "gpu-99", "", "x" * 70_000, "gpu-6\n", "../gpu-6"])
def test_a_device_that_is_no_gpu_of_this_node_holds_none_and_is_said_once(
    node: ExternalNode, log: Log, device: str
) -> None:
    node.prepares(THEIRS, device, "gpu-vfio-6")
    for _ in range(2):
        node.list_all()
    assert node.taken() == set()
    (warned,) = log.warnings()
    assert ODD in warned.text
    assert len(warned.fields["fault"]) < 200
    assert len(asks(node, "4")) == 4


def test_what_a_daemon_had_heard_holds_for_the_next_one(node: ExternalNode, tmp_path: Path) -> None:
    """Until PodResources answers it."""
    prepared(node, "gpu-6")
    write_ledger(tmp_path / "ledger.json", node.plugin.ledger)
    node.restart_daemon()
    node.node_state.ledger = read_ledger(tmp_path / "ledger.json", now=1.0)
    node.relist([])
    assert node.taken() == {uuid(1)}
    node.restart_daemon()
    node.node_state.ledger = read_ledger(tmp_path / "ledger.json", now=1.0)
    node.list_all()  # before the runtime has listed anything
    assert node.taken() == {uuid(1)}
