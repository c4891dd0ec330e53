"""Containers of pods that the kubelet admitted while NVIDIA's device plugin served the resource that is ours now.

The kubelet makes each start of them of that plugin's answer, which has no token of ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.value import encode
from nri_gpu.ledger.grant_text import SignedGrant, verify_grant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.convert import EMPTY
from nri_gpu.plugin.guard import Guard
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import EnvironmentSettings, Policy
from nri_gpu.records.audit_records import Compared, NodeRecord, PolicyRecord, Replay, decision_record
from nri_gpu.request.environment import VARIABLE
from nri_gpu.ttrpc.frames import Status
from tests.support import builders
from tests.support.builders import container, gpu, held_node, mig_gpu, uuid
from tests.support.daemon import UUIDS
from tests.support.former_plugin import ANSWERS, Recorded
from tests.support.kubelet_nodes import GPU, RESERVED, ExternalNode, again, from_kubelet, reply_of, token
from tests.support.log import Log
from tests.support.plugin import KEY
from tests.unit.plugin.test_guard import Known

SERVING: Final = KubeletSettings(enabled=True, mig_strategy=MigStrategy.MIXED)
RENAMED: Final = replace(SERVING, replicas=2, rename=True)
WHOLE: Final = tuple(gpu(index, uuid=UUIDS[index]) for index in range(4))
IN_PARTS: Final = (mig_gpu(0, uuid=UUIDS[0]), *WHOLE[1:])
ENVVAR: Final = ANSWERS["envvar by uuid"]
BARE: Final = ANSWERS["cdi-annotations by uuid"]  # nothing of its answer reaches the container without CDI


def node_of(settings: KubeletSettings = SERVING, gpus: tuple[Gpu, ...] = WHOLE) -> ExternalNode:
    node = ExternalNode(settings)
    node.put_gpus(gpus)
    return node


@pytest.fixture
def node() -> ExternalNode:
    return node_of()


def guard_of(node: ExternalNode) -> Guard:
    return Guard(Known(policy=node.policy), lambda action: action())


def admitted(
    node: ExternalNode, recorded: Recorded = ENVVAR, pod: str = "train", **fields: Mapping[str, str]
) -> Container:
    """Its pod was admitted long ago; the kubelet lists what it allocated."""
    of = recorded.container(pod, **fields)
    node.admitted(of, recorded.ids, recorded.resource)
    return of


# How many GPUs of the list a container has after the change-over, and in which mode; None: it is left to who serves it.
AFTER: Final = {
    "envvar by uuid": "exclusive",
    "envvar by index": "exclusive",
    "envvar by uuid, two GPUs": "exclusive",
    "volume-mounts by uuid": "exclusive",
    "volume-mounts by index": "exclusive",
    "cdi-annotations by uuid": "exclusive",
    "cdi-annotations by index": "exclusive",
    "cdi-cri by uuid": "exclusive",
    "envvar and cdi-annotations": "exclusive",
    "envvar with PASS_DEVICE_SPECS": "exclusive",
    "replicas by uuid": "shared",
    "replicas by index": "shared",
    "replicas of another name": "shared",
    "MIG mixed by uuid": "exclusive",
    "MIG mixed by index": "exclusive",
}


@pytest.mark.parametrize("strategy", ANSWERS)
def test_what_the_kubelet_allocated_before_us_is_injected(strategy: str) -> None:
    recorded = ANSWERS[strategy]
    settings = RENAMED if recorded.resource.endswith(".shared") else SERVING
    gpus = IN_PARTS if strategy.startswith("MIG") else WHOLE
    node = node_of(settings, gpus)
    of = admitted(node, recorded)
    uuids = tuple(id_.partition("::")[0] for id_ in recorded.ids)
    assert node.create(of) == node.create(of) == uuids
    usage = node.plugin.ledger.usage()
    assert {uuid: used.mode for uuid, used in usage.items()} == dict.fromkeys(uuids, AFTER[strategy])
    # In use for the kubelet, and healthy, as far as it counts them by the devices that it is offered now.
    offered = {AllocatedDevice(recorded.resource, id_) for id_ in recorded.ids} <= node.devices.offered()
    assert node.taken() == (frozenset() if offered else frozenset(uuids))

    # The guard sees a grant as any, and the next daemon knows whose it is.
    shown = replace(of, annotations=node.annotations[of.id])
    signed = verify_grant(shown.annotations[GRANT_KEY], of.pod.uid, of.id, KEY)
    assert isinstance(signed, SignedGrant)
    assert signed.uuids == uuids
    assert node.start(shown)
    node.restarted({of.id: (of, True)})
    node.list_all()
    assert node.taken() == (frozenset() if offered else frozenset(uuids))


@pytest.mark.parametrize("strategy", ANSWERS)
def test_before_the_change_over_nobody_touches_it(strategy: str) -> None:
    recorded = ANSWERS[strategy]
    node = node_of(KubeletSettings(), IN_PARTS if strategy.startswith("MIG") else WHOLE)
    of = admitted(node, recorded)
    assert node.plugin.create_container(builders.create_payload(of)) == EMPTY
    assert guard_of(node).lifecycle(builders.event_payload(pb.START_CONTAINER, of)) == EMPTY


# By whom it has its GPU, whose answer of that time still works.
SERVED: Final = {
    "its CDI file is there": (BARE, {"devices": (held_node(gpu(1)),), "nvidia_hooks": frozenset({"nvidia-ctk"})}),
    "the same, by the kubelet's name": (
        ANSWERS["cdi-cri by uuid"],
        {"devices": (held_node(gpu(1)),), "cdi_devices": (f"k8s.device-plugin.nvidia.com/gpu={UUIDS[1]}",)},
    ),
    "PASS_DEVICE_SPECS": (ANSWERS["envvar with PASS_DEVICE_SPECS"], {"devices": (held_node(gpu(1)),)}),
}


@pytest.mark.parametrize(("recorded", "fields"), SERVED.values(), ids=SERVED)
def test_who_has_its_nodes_by_that_answer_is_left_alone(
    node: ExternalNode, recorded: Recorded, fields: dict[str, object]
) -> None:
    of = replace(admitted(node, recorded), **fields)
    assert node.plugin.create_container(builders.create_payload(of)) == EMPTY
    assert node.start(of)


@pytest.mark.parametrize("value", ["0", UUIDS[0], "all", "void", "none", "", f"{UUIDS[1]},{UUIDS[0]}", "9"])
def test_only_the_kubelets_names_count(node: ExternalNode, value: str) -> None:
    """An index may be another GPU's since, and a pod can set the variable itself."""
    assert node.create(admitted(node, env={VARIABLE: value})) == (UUIDS[1],)


def test_an_init_container_is_known_by_the_names(node: ExternalNode) -> None:
    """PodResources leaves it out; the kubelet passes its devices on to later containers."""
    main = admitted(node, ANSWERS["envvar by uuid, two GPUs"])
    both = f"{UUIDS[1]},{UUIDS[2]}"
    expected = {"1": UUIDS[1:2], UUIDS[2]: UUIDS[2:3], both: UUIDS[1:3], "all": [], "void": [], "3": [], UUIDS[3]: []}
    for number, (value, uuids) in enumerate(expected.items()):
        name = f"init-{number}"
        init = replace(main, id=ContainerId(name), name=name, env={VARIABLE: value})
        assert node.create(init) == tuple(uuids)
    beyond = replace(main, id=ContainerId("beyond"), name="beyond", env={VARIABLE: f"{UUIDS[1]},{UUIDS[3]}"})
    assert "[bad-request]" in str(node.create(beyond))


# Whom it matters to that the kubelet has not said yet what it allocated.
WAITS: Final = {
    "a uuid": (ENVVAR.container(), True),
    "an index": (ANSWERS["envvar by index"].container(), True),
    "mounts": (ANSWERS["volume-mounts by uuid"].container(), True),
    "a uuid among names of none": (container(env={VARIABLE: f"GPU-x,{UUIDS[1]}"}), True),
    "all": (container(env={VARIABLE: "all"}), False),
    "void": (container(env={VARIABLE: "void"}), False),
    "none": (container(env={VARIABLE: "none"}), False),
    "empty": (container(env={VARIABLE: ""}), False),
    "another node's uuid": (container(env={VARIABLE: uuid(7)}), False),
    "an index of none": (container(env={VARIABLE: "9"}), False),
    "a word": (container(env={VARIABLE: "nvidia0"}), False),
    "no mount": (container(env={VARIABLE: "/var/run/nvidia-container-devices"}), False),
    "no variable": (BARE.container(), False),
}


@pytest.mark.parametrize(("of", "waits"), WAITS.values(), ids=WAITS)
def test_while_the_kubelet_has_not_answered(node: ExternalNode, of: Container, *, waits: bool) -> None:
    node.sandbox_created(of)
    got = str(node.create(of))
    if waits:
        assert got.startswith(f"nri-gpu [node-not-ready]: {VARIABLE}: ")
        assert "will be tried again" in got
    assert waits or got == "()"
    node.lists(of, [])
    node.answer()
    assert node.create(of) == ()
    shown = replace(of, annotations=node.annotations[of.id])
    assert guard_of(node).lifecycle(builders.event_payload(pb.START_CONTAINER, shown)) == EMPTY
    assert node.start(shown)


def test_a_pod_that_the_kubelet_does_not_know_yet_waits(node: ExternalNode) -> None:
    of = ENVVAR.container()
    node.sandbox_created(of)
    node.pods.questions.clear()
    node.list_all()
    assert "the kubelet knows of no such pod" in str(node.create(of))
    node.lists(of, ENVVAR.ids)
    node.answer()
    assert node.create(of) == (UUIDS[1],)


def test_where_podresources_is_not_served_nothing_is_refused(node: ExternalNode) -> None:
    node.pods.absent = True
    of = ENVVAR.container()
    assert node.create(of) == ()
    shown = replace(of, annotations=node.annotations[of.id])
    assert node.start(shown)
    assert guard_of(node).lifecycle(builders.event_payload(pb.START_CONTAINER, shown)) == EMPTY
    node.lists(of, ENVVAR.ids)
    node.answer()
    assert node.create(again(of)) == (UUIDS[1],)  # an answer of before counts on


def test_where_it_is_not_asked_everything_is_as_it_was(node: ExternalNode) -> None:
    node.plugin.external.pods = None
    assert node.create(ENVVAR.container()) == ()
    off = node_of(replace(SERVING, podresources=""))
    start = builders.event_payload(pb.START_CONTAINER, ENVVAR.container())
    assert guard_of(off).lifecycle(start) == EMPTY


@pytest.mark.parametrize("recorded", [ENVVAR, ANSWERS["envvar by index"], ANSWERS["volume-mounts by uuid"]])
def test_created_while_the_daemon_was_away_the_guard_stops_it(node: ExternalNode, recorded: Recorded) -> None:
    start = builders.event_payload(pb.START_CONTAINER, recorded.container())
    for answer in (guard_of(node).lifecycle(start), node.plugin.lifecycle(start)):
        assert isinstance(answer, Status)
        assert "[not-granted]" in answer.message


@pytest.mark.parametrize("value", ["all", "void", "none", "", "nvidia0", "a,b"])
def test_the_guard_lets_pass_who_names_no_device(node: ExternalNode, value: str) -> None:
    start = builders.event_payload(pb.START_CONTAINER, container(env={VARIABLE: value}))
    assert guard_of(node).lifecycle(start) == EMPTY


# What PodResources may list, and what the refusal says. Without a variable too: then nothing else names a device.
LIES: Final = {
    "another node's": (uuid(7), f"allocated {uuid(7)} of nvidia.com/gpu to this container, and this node has no such"),
    "an index": ("1", "allocated 1 of nvidia.com/gpu"),
    "the beginning of a uuid": (UUIDS[1][:12], "this node has no such GPU"),
    "a bus id": ("0000:3b:00.0", "this node has no such GPU"),
    "ten thousand characters": ("GPU-" + "x" * 10_000, "this node has no such GPU"),
    "nothing": ("", "this node has no such GPU"),
}


@pytest.mark.parametrize("env", [{VARIABLE: UUIDS[1]}, {}], ids=["a variable", "no variable"])
@pytest.mark.parametrize(("id_", "says"), LIES.values(), ids=LIES)
def test_a_device_that_the_node_has_not_is_refused(
    node: ExternalNode, id_: str, says: str, env: dict[str, str], log: Log
) -> None:
    of = container(env=env)
    node.admitted(of, [id_])
    refused = str(node.create(of))
    assert says in refused
    assert "delete the pod" in refused
    assert len(refused) < 800
    assert log.one("kubelet allocation not valid").fields["fault"]
    assert not {entry.grant.uuids for entry in node.plugin.ledger.entries.values()}


def test_a_resource_with_a_long_name_hides_no_sentence(node: ExternalNode) -> None:
    of = ENVVAR.container()
    node.admitted(of, [uuid(7)], "nvidia.com/mig-" + "x" * 10_000)
    refused = str(node.create(of))
    assert refused.isascii()
    assert refused.endswith("delete the pod to have the kubelet allocate again.")


def test_another_plugins_resource_is_held_to_the_same() -> None:
    """An id that is an index, where the container has no variable to compare it with."""
    node = node_of(KubeletSettings(inject_for=Globs(("nvidia.com/*",))))
    of = container(env={})
    node.admitted(of, ["1"])
    assert "this node has no such GPU" in str(node.create(of))


def test_before_the_gpus_are_known_it_waits(node: ExternalNode) -> None:
    node.put_gpus([], fault="NVML is not loaded yet")
    for env in ({VARIABLE: UUIDS[1]}, {}):
        of = admitted(node, pod=f"pod-{len(env)}", env=env)
        refused = str(node.create(of))
        assert "[node-not-ready]" in refused
        assert "NVML is not loaded yet" in refused
    early = ENVVAR.container("early")
    node.sandbox_created(early)
    assert "[node-not-ready]" in str(node.create(early))


def test_a_gpu_that_another_pod_holds_is_refused(node: ExternalNode) -> None:
    holder = container(f"device={UUIDS[1]}", of="holder")
    node.sandbox_created(holder)
    node.answer()
    assert node.create(holder) == (UUIDS[1],)
    assert "[gpu-busy]" in str(node.create(admitted(node)))


def test_a_gpu_that_the_kubelet_has_allocated_anew_is_the_new_pods(node: ExternalNode) -> None:
    """A list that is old, or a lie, takes no reservation of another pod: named or not named yet."""
    annotations = node.allocate(UUIDS[1])
    old = admitted(node)
    assert "[gpu-busy]" in str(node.create(old))
    new = from_kubelet(annotations, pod="new")
    node.lists(new, [UUIDS[1]])
    node.sandbox_created(new)
    node.answer()
    assert node.create(new) == (UUIDS[1],)
    assert "[gpu-busy]" in str(node.create(old))


def test_two_pods_that_are_listed_with_one_gpu_do_not_both_have_it(node: ExternalNode) -> None:
    first, second = admitted(node, pod="first"), admitted(node, pod="second")
    node.list_all()
    assert node.create(first) == (UUIDS[1],)
    assert "[gpu-busy]" in str(node.create(second))


def test_the_pods_own_reservation_is_its_containers(node: ExternalNode) -> None:
    """As after a restart of the daemon: PodResources lists the pod, whose sandbox may not be known yet."""
    of = ENVVAR.container()
    node.lists(of, ENVVAR.ids)
    node.list_all()
    assert "ml/train" in str(node.create(container(f"device={UUIDS[1]}", of="thief")))
    node.sandbox_created(of)
    node.answer()
    assert node.create(of) == (UUIDS[1],)
    assert not node.plugin.ledger.reservations
    assert node.start(of)
    node.stop(of)
    assert "[gpu-busy]" in str(node.create(container(f"device={UUIDS[1]}", of="thief")))
    assert node.create(again(of)) == (UUIDS[1],)


def test_a_token_goes_before_the_variable(node: ExternalNode) -> None:
    node.put_gpus([gpu(index) for index in range(4)])
    of = replace(from_kubelet(token(0)), env={VARIABLE: uuid(1)})
    node.admitted(of, [uuid(0)])
    assert node.create(of) == (uuid(0),)


def test_a_forged_variable_is_no_allocation(node: ExternalNode) -> None:
    """Beside a container of another pod which has the GPU, and in its own pod."""
    admitted(node)
    thief = ENVVAR.container("thief")
    node.admitted(thief, [])
    assert node.create(thief) == ()
    assert not node.plugin.ledger.usage()


def test_where_the_namespace_may_ask_by_variable_it_still_does(node: ExternalNode) -> None:
    node.node_state.use(replace(node.policy, environment=EnvironmentSettings(may_ask=Globs(("*",)))))
    of = ENVVAR.container()
    node.admitted(of, [])
    assert node.create(of) == (UUIDS[1],)


def test_the_pods_annotation_shapes_it(node: ExternalNode) -> None:
    of = replace(ENVVAR.container(), pod=builders.pod("train", "capabilities=utility"))
    node.admitted(of, ENVVAR.ids)
    assert node.create(of) == (UUIDS[1],)
    assert reply_of(node, of).adjust.linux.devices
    out = replace(ENVVAR.container("out"), pod=builders.pod("out", "none"))
    node.admitted(out, [UUIDS[2]])
    assert node.create(out) == ()


def test_devices_of_two_plugins_are_refused() -> None:
    node = node_of(replace(SERVING, inject_for=Globs(("example.com/*",))))
    of = ENVVAR.container()
    node.lists(of, [UUIDS[1]])
    node.admitted(of, [UUIDS[2]], "example.com/gpu")
    assert "of nri-gpu's own resource and of another" in str(node.create(of))
    mixed = container(of="mixed")
    node.admitted(mixed, [UUIDS[1], f"{UUIDS[2]}::0"])
    assert "shared and unshared" in str(node.create(mixed))


def test_beside_another_plugin_that_we_inject_for_both_are_served() -> None:
    node = node_of(replace(SERVING, inject_for=Globs(("example.com/*",)), reservations=Globs((RESERVED,))))
    ours, theirs = admitted(node), container(of="theirs", env={VARIABLE: UUIDS[2]})
    node.admitted(theirs, [UUIDS[2]], "example.com/gpu")
    assert node.create(ours) == (UUIDS[1],)
    assert node.create(theirs) == (UUIDS[2],)


def test_its_audit_record_is_decided_again_alike(node: ExternalNode) -> None:
    of = admitted(node)
    assert node.create(of) == (UUIDS[1],)
    (entry,) = node.plugin.ledger.entries.values()
    assert entry.allocation == Allocated((AllocatedDevice(GPU, UUIDS[1]),), key=GPU)
    decided = replace(of, kubelet=entry.allocation)
    decision = decide(decided, node.node, Ledger(), node.policy)
    replay = Replay(lambda *_: node.policy)
    for record in (
        NodeRecord(node=encode(node.node)),
        PolicyRecord("", ""),
        decision_record(decided, decision, 1e9, 1),
    ):
        compared = replay.take(json.loads(json.dumps(to_builtins(record))))
    assert isinstance(compared, Compared)
    assert compared.recorded == compared.now
    assert compared.now["gpu_uuids"] == [UUIDS[1]]


def test_the_way_back_takes_a_new_pod() -> None:
    """The kubelet keeps our answer, and nobody can read it where our device plugin is off."""
    node = node_of(KubeletSettings())
    node.plugin.kubelet.key = None
    of = replace(from_kubelet(token(1)), mounts=frozenset({REQUIRED_DESTINATION}))
    refused = str(node.create(of))
    assert "[bad-request]" in refused
    assert "or delete the pod" in refused


def test_the_policy_of_another_resource_leaves_it_alone() -> None:
    node = ExternalNode(replace(SERVING, resource="example.com/gpu"))
    node.put_gpus(WHOLE)
    assert node.create(admitted(node)) == ()
    assert Policy.default().kubelet.reads_variable is False
