"""A pod-wide annotation of a pod whose GPUs the kubelet or a claim allocated shapes these, and asks for no more."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, AllocatedDevice, ContainerDevices, PodDevices
from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.ledger.events import ClaimsInQuestion
from nri_gpu.ledger.grant_text import SignedGrant, verify_grant
from nri_gpu.plugin.guard import Guard
from nri_gpu.policy.read import parse_policy
from tests.support import builders
from tests.support.builders import container, pod, uuid
from tests.support.claim_nodes import ClaimNode, allocated, with_claims
from tests.support.kubelet_nodes import GPU, OURS, ExternalNode, of_plugin
from tests.support.log import Log
from tests.support.plugin import KEY
from tests.unit.plugin.test_guard import Known

SHAPE: Final = "all;capabilities=utility"
ONLY_SHAPES: Final = "capabilities=utility"
KUBEPODS: Final = "/kubepods/burstable/poduid-train"
OPT_OUT: Final = "annotate its pod with gpu.nri.io/container.proxy: none."


@pytest.fixture
def node() -> ExternalNode:
    return ExternalNode()


@pytest.fixture
def claims() -> ClaimNode:
    return ClaimNode()


def proxy(claim: str = SHAPE, name: str = "proxy", key: str = "gpu.nri.io", of: str = "train") -> Container:
    """A container that somebody injected into a pod with that annotation."""
    return container(of=pod(of, annotations={key: claim}), name=name)


def check_passes(node: ExternalNode | ClaimNode, of: Container) -> None:
    """It is granted nothing, in writing, so that the guard lets it start."""
    assert node.create(of) == ()
    signed = verify_grant(node.annotations[of.id][GRANT_KEY], of.pod.uid, of.id, KEY)
    assert isinstance(signed, SignedGrant)
    assert signed.of_nothing
    shown = replace(of, annotations=node.annotations[of.id])
    guard = Guard(Known(policy=node.node_state.policy), lambda action: action())
    assert guard.lifecycle(builders.event_payload(pb.START_CONTAINER, shown)) == b""
    assert node.start(of)


@pytest.mark.parametrize("claim", [SHAPE, ONLY_SHAPES, "1", "2;mode=exclusive", "model=*A100*", "device=3"])
@pytest.mark.parametrize("key", ["gpu.nri.io", "gpu.nri.io/pod"])
@pytest.mark.parametrize("resource", [OURS, GPU])
def test_beside_what_the_kubelet_allocated(node: ExternalNode, claim: str, key: str, resource: str) -> None:
    node.admitted(proxy(name="main"), [uuid(1)], resource)
    for name in ("proxy", "init", "debugger-x7"):  # PodResources lists neither init nor ephemeral containers
        check_passes(node, proxy(claim, name, key))
    assert not node.plugin.ledger.usage()


def test_the_container_that_has_them_is_shaped(node: ExternalNode) -> None:
    main = replace(proxy(name="main"), annotations=node.allocate(uuid(1), resource=OURS))
    node.admitted(main, [uuid(1)], OURS)
    init = proxy(name="init")
    check_passes(node, init)
    node.stop(init)
    assert node.create(main) == (uuid(1),)
    node.restarted({main.id: (main, True)})
    again = replace(proxy(), id=ContainerId("train.proxy.1"))
    assert "has not said yet" in str(node.create(again))
    node.answer()
    check_passes(node, again)


def test_a_variable_of_an_image_asks_for_nothing_more(node: ExternalNode) -> None:
    node.lists(proxy(name="cuda-gpu"), [])
    node.admitted(of_plugin(1, claim=SHAPE), [uuid(1)])
    for value in ("all", "void", uuid(3)):
        check_passes(node, replace(proxy(name=f"cuda-{value[:3].lower()}"), env={"NVIDIA_VISIBLE_DEVICES": value}))


def test_an_init_container_with_gpus_that_are_listed_nowhere_does_not_pass(node: ExternalNode) -> None:
    """A sidecar has those that are listed, so the kubelet gave the init container others."""
    node.admitted(proxy(name="sidecar"), [uuid(1)])
    refused = str(node.create(of_plugin(2, claim=SHAPE, name="init")))
    assert "[bad-request]: NVIDIA_VISIBLE_DEVICES: it names GPUs that the kubelet lists for no container" in refused


def test_the_log_says_why(node: ExternalNode) -> None:
    node.admitted(proxy(name="main"), [uuid(1)], OURS)
    with Log() as log:
        node.create(proxy())
    fields = log.one("GPU granted").fields
    assert (fields["gpu_uuid"], fields["mode"]) == ("-", "none")
    assert fields["reason"] == f"{OURS} is for other containers of its pod, and the pod's annotation only shapes that"
    assert not log.warnings()


@pytest.mark.parametrize("claim", [SHAPE, ONLY_SHAPES, "1"])
def test_before_the_kubelet_has_answered_it_waits(node: ExternalNode, claim: str) -> None:
    of = proxy(claim)
    node.lists(proxy(name="main"), [uuid(1)], OURS)
    node.sandbox_created(of)
    refused = str(node.create(of))
    assert refused.startswith("nri-gpu [node-not-ready]: gpu.nri.io: ")
    assert "will be tried again" in refused
    node.answer()
    check_passes(node, of)


@pytest.mark.parametrize("claim", ["none", "1;mdoe=shared", "device=0"])
def test_who_asks_for_none_or_names_gpus_does_not_wait(node: ExternalNode, claim: str) -> None:
    of = proxy(claim)
    node.sandbox_created(of)
    assert "[node-not-ready]" not in str(node.create(of))


def test_a_pod_that_the_kubelet_does_not_know_waits_if_a_kubelet_made_it(node: ExternalNode) -> None:
    made = proxy()
    made = replace(made, pod=replace(made.pod, cgroup_parent=KUBEPODS))
    for of, refused in ((made, True), (proxy("1", of="by-hand"), False)):
        node.sandbox_created(of)
        node.pods.questions.clear()
        node.list_all()
        assert ("[node-not-ready]" in str(node.create(of))) is refused
    node.lists(proxy(name="main"), [uuid(1)], OURS)
    node.list_all()
    check_passes(node, made)


def test_where_the_kubelets_socket_is_not_there(node: ExternalNode) -> None:
    node.pods.absent = True
    of = proxy("1")
    assert node.create(of) == (uuid(0),)
    made = replace(proxy("1", of="other"), pod=replace(pod("other", "1"), cgroup_parent=KUBEPODS))
    assert "has not said yet" in str(node.create(made))


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (ONLY_SHAPES, "and the kubelet allocated none to this container"),
        (SHAPE, "which only the kubelet allocates"),
        ("1;mode=mps", "mode: mps (docs/mps.md); if this container"),
    ],
)
def test_a_pod_without_any_is_refused(node: ExternalNode, claim: str, says: str, *, asked: bool) -> None:
    raw = {
        "pool": [{"name": "cluster", "model": "*"}],
        "kubelet": {"enabled": True, "pool": "cluster"},
        "mps": {"enabled": True},
    }
    node.node_state.use(parse_policy(raw, "test"))
    of = proxy(claim)
    node.admitted(of, [])
    if not asked:
        node.plugin.external.pods = None
    refused = str(node.create(of))
    assert says in refused
    assert refused.endswith(OPT_OUT)


def test_no_key_can_have_a_longer_name(node: ExternalNode) -> None:
    node.plugin.external.pods = None
    assert "container." not in str(node.create(proxy(ONLY_SHAPES, "p" * 54)))
    assert f"container.{'p' * 53}: none." in str(node.create(proxy(ONLY_SHAPES, "p" * 53)))


def test_by_its_own_annotation_a_container_asks_strictly(node: ExternalNode) -> None:
    node.admitted(proxy(name="main"), [uuid(1)], OURS)
    assert node.create(proxy("device=0", key="gpu.nri.io/container.proxy")) == (uuid(0),)
    refused = str(node.create(proxy(ONLY_SHAPES, "side", "gpu.nri.io/container.side")))
    assert "[bad-request]" in refused
    assert "annotate its pod" not in refused


def test_a_value_that_is_not_valid_refuses_it_too(node: ExternalNode) -> None:
    node.admitted(proxy(name="main"), [uuid(1)], OURS)
    assert 'unknown "mdoe"' in str(node.create(proxy("1;mdoe=shared")))


def test_a_container_that_lost_what_shows_its_gpus_has_what_the_kubelet_lists(node: ExternalNode) -> None:
    """Another plugin removed the kubelet's annotation from it."""
    robbed = proxy(ONLY_SHAPES, "main")
    node.admitted(robbed, [uuid(1)], OURS)
    assert node.create(robbed) == (uuid(1),)


def test_a_container_that_lost_all_but_the_required_device_does_not_pass(node: ExternalNode) -> None:
    """PodResources does not list it: it is an init container that ends."""
    robbed = replace(proxy(ONLY_SHAPES, "main"), mounts=frozenset({REQUIRED_DESTINATION}))
    node.admitted(proxy(name="side"), [uuid(2)], OURS)
    assert "[bad-request]" in str(node.create(robbed))


def test_an_answer_about_another_pod_of_that_name_counts_for_nothing(node: ExternalNode) -> None:
    first = proxy(name="main")
    node.admitted(first, [uuid(1)], OURS)
    anew = replace(pod("train", ONLY_SHAPES), id=PodId("sandbox-2"), uid=PodUid("uid-2"))
    second = replace(proxy(), pod=anew)
    assert "has not said yet" in str(node.create(second))
    node.pods.put(first.pod, node.listed["ml", "train"])  # late, and of the first
    assert "has not said yet" in str(node.create(second))
    node.listed.clear()
    node.answer()
    assert "[bad-request]" in str(node.create(second))


def test_devices_that_are_no_gpus_are_none(node: ExternalNode) -> None:
    node.admitted(proxy(name="main"), ["0000:3b:00.0"], "example.com/nic")
    assert "[bad-request]" in str(node.create(proxy(ONLY_SHAPES)))


@pytest.mark.parametrize("claim", [SHAPE, ONLY_SHAPES, "1"])
def test_beside_a_claim(claims: ClaimNode, claim: str) -> None:
    """Whether the container that names it is there, was, or is to come; also where only an init container names it."""
    found = claims.prepared(allocated(0))
    init = with_claims(proxy(SHAPE, "init"), found)
    check_passes(claims, proxy(claim, "first"))
    assert claims.create(init) == (uuid(0),)
    claims.stop(init)
    check_passes(claims, proxy(claim))
    claims.unprepare(found.uid)
    assert claims.create(proxy("1", "late")) == (uuid(0),)


def test_a_claim_of_other_pods_is_none_of_its(claims: ClaimNode) -> None:
    claims.prepared(allocated(0, pods=("other",)))
    assert "[bad-request]" in claims.refused(proxy(ONLY_SHAPES))
    namesake = replace(proxy(ONLY_SHAPES, of="other"), pod=replace(pod("other", ONLY_SHAPES), uid=PodUid("uid-2")))
    assert "[bad-request]" in claims.refused(namesake)


def test_beside_a_claim_for_monitoring_it_asks_for_itself(claims: ClaimNode) -> None:
    """That lets the pod look at a GPU that others hold, so it has none that an annotation could shape."""
    found = claims.prepared(allocated(0, admin=True))
    claims.kubelet_lists(proxy().pod, main=[found], proxy=[])
    assert "[bad-request]" in claims.refused(proxy(ONLY_SHAPES))
    assert claims.create(proxy("1", "second")) == (uuid(0),)


def test_it_waits_while_a_claim_is_read_that_it_may_share(claims: ClaimNode) -> None:
    found = claims.prepared(allocated(0, pods=("other",)))
    claims.sandbox_created(proxy())
    assert claims.plugin.ledger.in_question == {found.uid}
    assert "`nri-gpu dra` has not said yet" in claims.refused(proxy())
    claims.prepared(allocated(0, pods=("other", "train")))
    check_passes(claims, proxy())
    stranger = container(of=pod("train", ONLY_SHAPES, namespace="else", uid="uid-else"))
    claims.plugin.apply(ClaimsInQuestion(0.0, frozenset({found.uid})))
    assert "[bad-request]" in claims.refused(stranger)


def test_it_waits_until_the_kubelet_says_who_has_the_claim_of_a_group(claims: ClaimNode) -> None:
    found = claims.prepared(allocated(0, pods=(), groups=("gang",)))
    assert "(PodResources)" in claims.refused(proxy())
    claims.kubelet_lists(proxy().pod, main=[found], proxy=[])
    check_passes(claims, proxy())
    claims.prepared(allocated(0, pods=(), groups=("gang",)))
    assert "(PodResources)" in claims.refused(proxy(of="alone"))
    claims.kubelet_lists(proxy(of="alone").pod, main=[])
    assert claims.create(proxy("1", of="alone")) == (uuid(1),)


def test_policy_has_no_say_in_what_gets_nothing() -> None:
    node = ExternalNode()
    node.node_state.use(parse_policy({"namespaces": {"allow": ["other"]}, "kubelet": {"enabled": True}}, "test"))
    of = proxy()
    device = AllocatedDevice("nvidia.com/gpu", uuid(1))
    node.sandbox_created(of)
    node.pods.put(of.pod, PodDevices("ml", "train", (ContainerDevices("main", (device,)),)))
    check_passes(node, of)
