"""Others' device plugins give, we inject: by the kubelet's word alone, and never more of it than that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.reservations import SETTLED_S
from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri.convert import EMPTY
from nri_gpu.plugin.guard import Guard
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import EnvironmentSettings, Policy, VisibleDevices
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE
from nri_gpu.ttrpc.events import Status
from tests.support import builders
from tests.support.builders import container, gpu, held_node, mig_gpu, mig_uuid, pod, uuid
from tests.support.log import Log
from tests.support.plugin import KEY
from tests.unit.kubelet.beside import OURS, RESERVED, SHARING, THEIRS, Beside, env_of, nodes_of, of_plugin, reply_of
from tests.unit.kubelet.station import GPU, again, from_kubelet
from tests.unit.kubelet.test_token import token

REPLICAS = [f"{uuid(1)}::0", f"{uuid(1)}::3"]
NODE = "/dev/nvidia{}"


def node(index: int) -> str:
    return NODE.format(7 - index)


# --- what is granted -------------------------------------------------------------------------------------------------


def test_what_the_kubelet_gave_and_the_variable_names() -> None:
    node_ = Beside()
    of = of_plugin(1, 2)
    node_.admitted(of, [uuid(2), uuid(1)])
    reply = reply_of(node_, of)
    assert {node(1), node(2)} == {each for each in nodes_of(reply) if each[-1].isdigit()}
    assert env_of(reply)[VARIABLE] == f"{uuid(1)},{uuid(2)}"
    assert GRANT_KEY in reply.adjust.annotations
    assert node_.plugin.ledger.usage()[uuid(1)].mode == "exclusive"


WRITTEN = {
    "by uuid": ({VARIABLE: uuid(1)}, frozenset[str]()),
    "by index": ({VARIABLE: "1"}, frozenset[str]()),
    "without the variable": ({}, frozenset[str]()),
    "as mounts": ({VARIABLE: MOUNTED_NAMES}, frozenset({f"{MOUNTED_NAMES}/{uuid(1)}", "/data"})),
    "as a CDI name": ({VARIABLE: f"k8s.device-plugin.nvidia.com/gpu={uuid(1)}"}, frozenset[str]()),
}


@pytest.mark.parametrize(("env", "mounts"), WRITTEN.values(), ids=WRITTEN)
def test_every_way_in_which_the_plugin_says_it(env: dict[str, str], mounts: frozenset[str]) -> None:
    node_ = Beside()
    of = of_plugin(env=env, mounts=mounts)
    node_.admitted(of, [uuid(1)])
    assert node_.create(of) == (uuid(1),)


def test_mig_devices_by_uuid_and_by_index() -> None:
    for written in (mig_uuid(0, 1), "0:1"):
        node_ = Beside()
        node_.put_gpus([mig_gpu(0), gpu(1)])
        of = of_plugin(env={VARIABLE: written})
        node_.admitted(of, [mig_uuid(0, 1)], "nvidia.com/mig-1g.5gb")
        assert node_.create(of) == (mig_uuid(0, 1),)


def test_replicas_are_shared() -> None:
    node_ = Beside()
    for number, id_ in enumerate(REPLICAS):
        of = of_plugin(1, pod=f"shares-{number}", claim="all;mode=shared;capabilities=utility")
        node_.admitted(of, [id_])
        assert node_.create(of) == (uuid(1),)
    assert node_.plugin.ledger.usage()[uuid(1)].mode == "shared"
    alone = of_plugin(2, pod="alone", claim="all;mode=shared")
    node_.admitted(alone, [uuid(2)])
    assert "kubelet gave in exclusive mode" in str(node_.create(alone))


def test_an_image_and_the_kubelet_both_set_the_variable() -> None:
    """CUDA images say `all`; the runtime puts the kubelet's behind it, and that is what programs see."""
    node_ = Beside()
    of = of_plugin(1, env_twice=frozenset({VARIABLE}))
    node_.admitted(of, [uuid(1)])
    assert node_.create(of) == (uuid(1),)


def test_annotations_shape_and_never_add() -> None:
    node_ = Beside()
    of = of_plugin(1, claim="all;capabilities=utility")
    node_.admitted(of, [uuid(1)])
    assert "/dev/nvidia-uvm" not in nodes_of(reply_of(node_, of))
    for number, claim in enumerate(("2", "device=0", "mig=1g.5gb:1", "1;mode=shared")):
        more = of_plugin(2, pod=f"more-{number}", claim=claim)
        node_.admitted(more, [uuid(2)])
        assert "[bad-request]" in str(node_.create(more)), claim
        node_.over(more)
    none = of_plugin(3, pod="none", claim="none")
    node_.admitted(none, [uuid(3)])
    assert node_.create(none) == ()


@pytest.mark.parametrize("void", [True, False])
def test_a_leftover_hook_is_kept_idle_as_for_every_grant(void: bool) -> None:
    node_ = Beside()
    how = VisibleDevices.VOID if void else VisibleDevices.UUIDS
    node_.plugin.state.policy = replace(node_.policy, environment=EnvironmentSettings(visible_devices=how))
    of = of_plugin(1)
    node_.admitted(of, [uuid(1)])
    env = env_of(reply_of(node_, of))
    assert env[VARIABLE] == ("void" if void else uuid(1))
    assert env.get("NRI_GPU_UUIDS") == (uuid(1) if void else None)


def test_the_same_container_asking_twice_and_its_restarts() -> None:
    node_ = Beside()
    of = of_plugin(1)
    node_.admitted(of, [uuid(1)])
    assert node_.create(of) == node_.create(of) == (uuid(1),)
    assert node_.start(of)
    node_.stop(of)
    assert "[gpu-busy]" in str(node_.create(container("device=1", of="thief")))  # kept for its pod
    assert node_.create(again(of)) == (uuid(1),)


# --- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["all", "", "void", "none", uuid(0), "0", "0,1", f"{uuid(1)},{uuid(0)}", "nonsense,é"]
)
def test_a_variable_by_itself_is_no_grant(value: str) -> None:
    node_ = Beside()
    of = of_plugin(env={VARIABLE: value})
    node_.came(of)
    node_.answer()
    reply = reply_of(node_, of)
    assert not nodes_of(reply)
    assert not node_.plugin.ledger.usage()
    assert node_.start(of)


def test_a_variable_that_the_kubelet_did_not_write_is_no_grant_in_may_ask_either() -> None:
    node_ = Beside()
    node_.plugin.state.policy = replace(node_.policy, environment=EnvironmentSettings(may_ask=Globs(("*",))))
    of = of_plugin(1)
    node_.came(of)
    node_.answer()
    assert node_.create(of) == ()


OTHERS = {
    "another": ({VARIABLE: uuid(0)}, frozenset[str]()),
    "one more": ({VARIABLE: f"{uuid(1)},{uuid(0)}"}, frozenset[str]()),
    "all": ({VARIABLE: "all"}, frozenset[str]()),
    "another index": ({VARIABLE: "0"}, frozenset[str]()),
    "an index of none": ({VARIABLE: "9"}, frozenset[str]()),
    "mounts of another": ({VARIABLE: MOUNTED_NAMES}, frozenset({f"{MOUNTED_NAMES}/{uuid(0)}"})),
    "no mounts": ({VARIABLE: MOUNTED_NAMES}, frozenset[str]()),
}


@pytest.mark.parametrize(("env", "mounts"), OTHERS.values(), ids=OTHERS)
def test_other_gpus_than_the_kubelet_gave_are_refused(env: dict[str, str], mounts: frozenset[str]) -> None:
    node_ = Beside()
    of = of_plugin(env=env, mounts=mounts)
    node_.admitted(of, [uuid(1)])
    refused = str(node_.create(of))
    assert refused.startswith(f"nri-gpu [bad-request]: {VARIABLE}: it says")
    assert uuid(1) in refused


@pytest.mark.parametrize("value", ["void", "none", ""])
def test_who_opts_out_has_none(value: str) -> None:
    node_ = Beside()
    of = of_plugin(env={VARIABLE: value})
    node_.admitted(of, [uuid(1)])
    assert not nodes_of(reply_of(node_, of))


def test_another_containers_gpu_is_not_this_ones() -> None:
    node_ = Beside()
    main = of_plugin(1)
    side = replace(main, id=ContainerId("train.side"), name="side")
    node_.give(main, [uuid(1)])
    node_.give(side, [])
    node_.came(main)
    node_.answer()
    assert node_.create(side) == ()
    assert node_.create(main) == (uuid(1),)


def test_an_init_container_which_the_kubelet_does_not_list() -> None:
    """It makes an init container's devices those of later containers, and lists them there."""
    node_ = Beside()
    main = of_plugin(1, 2)
    node_.admitted(main, [uuid(1), uuid(2)])
    assert node_.create(replace(main, id=ContainerId("train.init"), name="init", env={VARIABLE: uuid(1)})) == (uuid(1),)
    beyond = replace(main, id=ContainerId("train.init2"), name="init2", env={VARIABLE: f"{uuid(1)},{uuid(0)}"})
    assert "it says" in str(node_.create(beyond))
    other = replace(main, id=ContainerId("train.init3"), name="init3", env={VARIABLE: uuid(0)})
    assert node_.create(other) == ()


def test_before_the_kubelet_told_it_is_refused_and_asked() -> None:
    node_ = Beside()
    of = of_plugin(1)
    node_.give(of, [uuid(1)])
    node_.came(of)
    refused = str(node_.create(of))
    assert refused.startswith(f"nri-gpu [node-not-ready]: {VARIABLE}: ")
    assert "will be tried again" in refused
    node_.answer()
    assert node_.create(of) == (uuid(1),)
    late = of_plugin(2, pod="before-us")  # its sandbox was there before the daemon was
    node_.give(late, [uuid(2)])
    assert "[node-not-ready]" in str(node_.create(late))
    node_.answer()
    assert node_.create(late) == (uuid(2),)
    plain = container(of="plain", env={VARIABLE: "all"})
    assert node_.create(plain) == ()  # no device plugin wrote that


def test_a_pod_that_the_kubelet_does_not_know_is_none_that_it_gave_nothing() -> None:
    """It was restarted perhaps, and will know it soon; so it is asked again."""
    node_ = Beside()
    of = of_plugin(1)
    node_.came(of)
    node_.pods.questions.clear()
    node_.ask_all()
    assert "the kubelet knows of no such pod" in str(node_.create(of))
    node_.give(of, [uuid(1)])
    node_.answer()
    assert node_.create(of) == (uuid(1),)


def test_without_podresources_nobody_starts_without_its_gpus() -> None:
    node_ = Beside()
    node_.plugin.external.pods = None
    refused = str(node_.create(of_plugin(1)))
    assert "[node-not-ready]" in refused
    assert "kubelet.podresources is empty" in refused
    assert node_.create(container("1", of="by-annotation")) == (uuid(0),)


def test_one_name_and_another_pod() -> None:
    """An answer is the sandbox's that was there: a StatefulSet's next pod of that name has to be asked about anew."""
    node_ = Beside()
    first = of_plugin(1)
    node_.admitted(first, [uuid(1)])
    assert node_.create(first) == (uuid(1),)
    stale = node_.pods.all()
    second = of_plugin(1, pod="train")
    second = replace(
        second, id=ContainerId("second"), pod=replace(second.pod, id=PodId("sandbox-2"), uid=PodUid("uid-2"))
    )
    node_.came(second)
    assert "[node-not-ready]" in str(node_.create(second))
    node_.pods.put(stale[0], node_.listed["ml", "train"])  # late, and of the first
    assert "[node-not-ready]" in str(node_.create(second))


def test_two_pods_of_one_name_are_no_answer() -> None:
    node_ = Beside()
    of = of_plugin(1)
    node_.give(of, [uuid(1)])
    node_.came(of)
    given = node_.listed["ml", "train"]
    node_.pods.put_list(node_.pods.all(), (given, given))
    assert "[node-not-ready]" in str(node_.create(of))


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
def test_whom_others_inject_is_left_to_them(fields: dict[str, object]) -> None:
    node_ = Beside()
    of = replace(of_plugin(1), **fields)
    node_.admitted(of, [uuid(1)])
    reply = node_.plugin.create_container(builders.create_payload(of))
    assert reply == EMPTY
    assert node_.start(of)
    if of.devices:
        assert node_.plugin.ledger.usage()[uuid(1)].external
        assert "[gpu-busy]" in str(node_.create(container("device=1", of="thief")))


def test_no_two_hands_on_one_container() -> None:
    node_ = Beside()
    of = replace(from_kubelet(token(0)), env={VARIABLE: uuid(1)})
    node_.give(of, [uuid(0)], GPU)
    node_.came(of)
    node_.answer()
    assert "of nri-gpu's own resource and of another" in str(node_.create(of))


# --- one ledger ------------------------------------------------------------------------------------------------------


def test_both_kinds_side_by_side() -> None:
    node_ = Beside()
    theirs = of_plugin(1, pod="theirs")
    node_.admitted(theirs, [uuid(1)])
    assert node_.create(theirs) == (uuid(1),)
    annotations = node_.allocate(uuid(2), resource=OURS)
    ours = from_kubelet(annotations, pod="ours")
    node_.admitted(ours, [uuid(2)], OURS)
    assert node_.create(ours) == (uuid(2),)
    assert node_.create(container("2", of="local")) == (uuid(0), uuid(3))
    why = {device.id: bool(device.why) for device in node_.offers.devices(OURS)}
    assert why == {uuid(0): True, uuid(1): True, uuid(2): False, uuid(3): True}
    assert node_.plugin.ledger.usage().keys() == {uuid(index) for index in range(4)}


def test_what_they_gave_before_any_container_is_held() -> None:
    node_ = Beside()
    of = of_plugin(1, pod="pulls-its-image")
    node_.give(of, [uuid(1)])
    node_.came(of)
    node_.ask_all()
    assert "ml/pulls-its-image" in str(node_.create(container("device=1", of="thief")))
    assert [device.id for device in node_.offers.devices(OURS) if device.why] == [uuid(1)]
    assert node_.create(of) == (uuid(1),)
    assert len(node_.plugin.ledger.entries) == 1
    assert not node_.plugin.ledger.reservations  # the reservation became the grant


def test_promises_end_when_the_kubelet_lists_them_no_more() -> None:
    node_ = Beside()
    of = of_plugin(1)
    node_.give(of, [uuid(1)])
    node_.ask_all()
    node_.listed.clear()
    node_.ask_all()
    assert node_.plugin.ledger.usage().keys() == {uuid(1)}  # once missing is not gone
    node_.clock.now += SETTLED_S
    node_.ask_all()
    assert not node_.plugin.ledger.usage()


def test_a_pod_that_is_over_leaves_its_gpu_to_be_looked_at() -> None:
    """Finished, and its sandbox still there: nobody but the kubelet's list tells."""
    node_ = Beside()
    node_.put_gpus([gpu(index, processes=0) for index in range(4)], simulated=False)
    of = of_plugin(1)
    node_.admitted(of, [uuid(1)])
    assert node_.create(of) == (uuid(1),)
    assert node_.start(of)
    node_.stop(of)
    node_.listed.clear()
    for _ in range(2):
        node_.ask_all()
        node_.clock.now += SETTLED_S
    assert "ml/train" in str(node_.create(container("device=1", of="next")))
    node_.plugin.looked(node_.node.inventory, node_.clock.now)
    assert node_.create(container("device=1", of="next")) == (uuid(1),)


def test_an_allocation_that_nobody_lists_ends_early_and_one_that_is_listed_does_not_lapse() -> None:
    node_ = Beside()
    node_.allocate(uuid(0), resource=OURS)
    annotations = node_.allocate(uuid(1), resource=OURS)
    slow = from_kubelet(annotations, pod="slow")
    node_.give(slow, [uuid(1)], OURS)
    node_.ask_all()
    node_.clock.now += SETTLED_S
    node_.ask_all()
    assert node_.plugin.ledger.usage().keys() == {uuid(1)}
    assert node_.plugin.ledger.usage()[uuid(1)].pods == {PodUid("kubelet"): "ml/slow"}
    node_.clock.now += 10_000
    node_.plugin.lapse()
    assert "ml/slow" in str(node_.create(container("device=1", of="thief")))
    node_.came(slow)
    node_.answer()
    assert node_.create(slow) == (uuid(1),)


def test_a_finished_pod_that_an_old_kubelet_lists_is_in_nobodys_way() -> None:
    node_ = Beside()
    done, fresh = of_plugin(1, pod="done"), of_plugin(1, pod="anew")
    node_.admitted(done, [uuid(1)])
    assert node_.create(done) == (uuid(1),)
    node_.end_pod(done)  # its sandbox is stopped; the pod is there until somebody deletes it
    node_.admitted(fresh, [uuid(1)])
    for _ in range(2):
        node_.ask_all()
        assert node_.plugin.ledger.usage()[uuid(1)].pods == {fresh.pod.uid: "ml/anew"}
    assert node_.create(fresh) == (uuid(1),)
    node_.ask_all()
    assert len(node_.plugin.ledger.usage()[uuid(1)].holders) == 1


def test_a_daemon_that_starts_anew_hears_what_it_forgot() -> None:
    node_ = Beside()
    theirs, ours = of_plugin(1, pod="theirs"), from_kubelet({}, pod="ours")
    annotations = node_.allocate(uuid(2), resource=OURS)
    node_.give(theirs, [uuid(1)])
    node_.give(ours, [uuid(2)], OURS)
    node_.restart_daemon()
    assert not node_.plugin.ledger.usage()
    node_.ask_all()
    assert node_.plugin.ledger.usage().keys() == {uuid(1), uuid(2)}
    assert node_.create(container("2", of="local")) == (uuid(0), uuid(3))
    assert [d.id for d in node_.offers.devices(OURS) if not d.why] == [uuid(2)]
    node_.came(theirs)
    node_.answer()
    assert node_.create(theirs) == (uuid(1),)
    assert node_.create(replace(ours, annotations=annotations)) == (uuid(2),)


def test_before_the_first_list_no_annotation_takes_what_the_kubelet_may_have_given() -> None:
    node_ = Beside()
    node_.pods.settled = False
    local = container("device=1", of="local")
    assert "has just started" in str(node_.create(local))
    assert node_.create(container(of="plain")) == ()
    node_.give(of_plugin(1), [uuid(1)])
    node_.ask_all()
    assert "[gpu-busy]" in str(node_.create(local))


def test_a_daemon_that_starts_anew_knows_whose_grants_were_the_kubelets() -> None:
    node_ = Beside()
    theirs = of_plugin(1, pod="theirs")
    node_.admitted(theirs, [uuid(1)])
    assert node_.create(theirs) == (uuid(1),)
    assert node_.start(theirs)
    node_.restarted({theirs.id: (theirs, True)})
    node_.ask_all()
    assert [d.id for d in node_.offers.devices(OURS) if d.why] == [uuid(1)]
    node_.stop(theirs)
    assert "[gpu-busy]" in str(node_.create(container("device=1", of="thief")))


def test_a_gpu_that_an_annotation_holds_is_not_given_twice() -> None:
    node_ = Beside()
    assert node_.create(container("device=1", of="local")) == (uuid(1),)
    of = of_plugin(1)
    node_.admitted(of, [uuid(1)])
    node_.ask_all()
    assert "[gpu-busy]" in str(node_.create(of))
    assert "ml/local" in str(node_.create(of))


# --- our own tokens, held against the kubelet's word -----------------------------------------------------------------


def test_a_token_holds_until_the_kubelet_says_otherwise(log: Log) -> None:
    node_ = Beside(KubeletSettings(enabled=True))
    of = from_kubelet(token(0))
    assert node_.create(of) == (uuid(0),)  # not told yet is no refusal
    node_.give(replace(of, name="sidecar"), [])
    node_.answer()
    assert node_.create(of) == (uuid(0),)  # nor is a container that the kubelet does not list
    node_.over(of)

    copied = from_kubelet(token(1), pod="copied")
    node_.give(copied, [])
    node_.came(copied)
    node_.answer()
    for _ in range(3):
        refused = str(node_.create(copied))
        assert refused.startswith("nri-gpu [bad-request]: gpu.nri.io/kubelet: the kubelet says that it allocated")
        assert "none of nvidia.com/gpu" in refused
    assert "copied from another container" in log.one("kubelet allocation not valid").fields["fault"]

    less = from_kubelet(token(1, 2), pod="less")
    node_.admitted(less, [uuid(1)])
    assert f"and not {uuid(1)}, {uuid(2)}" in str(node_.create(less))
    same = from_kubelet(token(2, 1), pod="same")
    node_.admitted(same, [uuid(1), uuid(2)])
    assert node_.create(same) == (uuid(1), uuid(2))


# --- fractions -------------------------------------------------------------------------------------------------------


def fraction(group: str, index: int = 1, name: str = "half") -> Container:
    return replace(of_plugin(index), id=ContainerId(name), pod=pod(name, labels={"runai-gpu-group": group}))


def reservation(group: str, namespace: str = RESERVED, index: int = 1) -> Container:
    labels = {"runai-gpu-group": group, "app": RESERVED}
    return replace(
        of_plugin(index),
        id=ContainerId(f"holds-{group}"),
        pod=pod(f"gpu-reservation-{group}", namespace=namespace, labels=labels),
    )


def test_fractions_of_a_gpu_that_their_scheduler_reserved() -> None:
    node_ = Beside(SHARING)
    holder = reservation("g1")
    node_.admitted(holder, [uuid(1)])
    assert node_.create(holder) == (uuid(1),)
    for name in ("one", "two"):
        of = fraction("g1", name=name)
        node_.came(of)
        node_.answer()
        assert node_.create(of) == (uuid(1),)
        assert node_.start(of)
    assert node_.plugin.ledger.usage()[uuid(1)].mode == "shared"
    assert len(node_.plugin.ledger.usage()[uuid(1)].holders) == 3
    assert "[gpu-busy]" in str(node_.create(container("device=1", of="thief")))


def test_a_pod_with_parts_of_two_gpus() -> None:
    node_ = Beside(SHARING)
    for index, group in ((1, "g1"), (2, "g2")):
        node_.admitted(reservation(group, index=index), [uuid(index)])
    labels = {"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"}
    of = replace(of_plugin(1, 2), pod=pod("both", labels=labels))
    assert node_.create(of) == (uuid(1), uuid(2))


FORGED = {
    "a GPU that nobody reserved": fraction("g1", 2),
    "another group's GPU": fraction("g2", 1),
    "a group of nobody": fraction("g9", 1),
}


@pytest.mark.parametrize("of", FORGED.values(), ids=FORGED)
def test_labels_and_variables_by_hand_share_nothing(of: Container) -> None:
    node_ = Beside(SHARING)
    node_.admitted(reservation("g1"), [uuid(1)])
    node_.admitted(reservation("g2", index=3), [uuid(3)])
    refused = str(node_.create(of))
    assert "[node-not-ready]" in refused
    assert "no pod in the namespaces of kubelet.reservations holds" in refused


def test_a_reservation_counts_in_its_namespace_only() -> None:
    node_ = Beside(SHARING)
    node_.admitted(reservation("g1", namespace="ml"), [uuid(1)])
    of = fraction("g1")
    assert "[node-not-ready]" in str(node_.create(of))
    node_.over(reservation("g1", namespace="ml"))
    node_.admitted(reservation("g1"), [uuid(1)])
    assert node_.create(of) == (uuid(1),)
    node_.over(reservation("g1"))
    assert "[node-not-ready]" in str(node_.create(fraction("g1", name="late")))


def test_a_group_without_the_setting_is_nothing() -> None:
    node_ = Beside(THEIRS)
    node_.admitted(reservation("g1"), [uuid(1)])
    of = fraction("g1")
    node_.came(of)
    node_.answer()
    assert node_.create(of) == ()


def test_reservations_by_our_own_device_plugin() -> None:
    node_ = Beside(KubeletSettings(enabled=True, reservations=Globs((RESERVED,))))
    annotations = node_.allocate(uuid(1))
    holder = replace(reservation("g1"), annotations=annotations, env={})
    node_.admitted(holder, [uuid(1)])
    assert node_.create(holder) == (uuid(1),)
    of = fraction("g1")
    node_.came(of)
    node_.answer()
    assert node_.create(of) == (uuid(1),)
    assert node_.start(of)
    assert not [device.id for device in node_.offers.devices(GPU) if device.why]  # it is the kubelet's still
    node_.restarted({of.id: (of, True), holder.id: (holder, True)})
    node_.ask_all()
    assert not [device.id for device in node_.offers.devices(GPU) if device.why]


def test_who_is_no_fraction_is_not_looked_at() -> None:
    node_ = Beside(KubeletSettings(reservations=Globs((RESERVED,))))
    assert node_.plugin.create_container(builders.create_payload(of_plugin(1))) == EMPTY
    assert node_.start(of_plugin(1))


# --- what it costs, and who is told ----------------------------------------------------------------------------------


def test_off_costs_nothing() -> None:
    node_ = Beside(KubeletSettings())
    node_.plugin.external.pods = None
    assert not node_.plugin._needs_reading(builders.create_payload(of_plugin(1)), node_.node)


def test_on_it_looks_at_whom_it_concerns() -> None:
    node_ = Beside()
    assert node_.plugin._needs_reading(builders.create_payload(of_plugin(1)), node_.node)
    plain = container()
    assert not node_.plugin._needs_reading(builders.create_payload(plain), node_.node)
    node_.admitted(plain, [uuid(1)])
    assert node_.plugin._needs_reading(builders.create_payload(plain), node_.node)
    node_.over(plain)
    assert not node_.plugin._needs_reading(builders.create_payload(plain), node_.node)


class Keyed:
    """What the guard reads."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def key(self) -> bytes:
        return KEY

    def policy(self) -> Policy:
        return self._policy


def test_created_while_we_were_away_it_does_not_start() -> None:
    node_ = Beside()
    of = of_plugin(1)
    guard = Guard(Keyed(node_.policy), lambda action: action())
    start = builders.event_payload(pb.START_CONTAINER, of)
    for refused in (node_.plugin.lifecycle(start), guard.lifecycle(start)):
        assert isinstance(refused, Status)
        assert "[not-granted]" in refused.message
    # One that runs already may have been served by NVIDIA's runtime, and is no business of ours.
    node_.restarted({})
    assert not node_.plugin.ungranted
    for served in (of_plugin(env={VARIABLE: "all"}), of_plugin(1, devices=(held_node(gpu(1)),)), container()):
        assert guard.lifecycle(builders.event_payload(pb.START_CONTAINER, served)) == EMPTY


def test_whoever_was_decided_on_may_start_past_the_guard() -> None:
    node_ = Beside()
    guard = Guard(Keyed(node_.policy), lambda action: action())
    for number, ids in enumerate(([uuid(1)], [])):
        of = of_plugin(1, pod=f"pod-{number}")
        node_.admitted(of, ids)
        reply = reply_of(node_, of)
        shown = replace(of, annotations=dict(reply.adjust.annotations))
        assert guard.lifecycle(builders.event_payload(pb.START_CONTAINER, shown)) == EMPTY


def test_many_sandboxes_are_bounded() -> None:
    node_ = Beside()
    for number in range(3000):
        node_.came(pod(f"pod-{number}"))
    assert len(node_.pods.all()) <= 1024
