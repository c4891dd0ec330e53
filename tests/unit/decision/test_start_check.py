"""What may be created and started as it stands, and what may not, with the sentence that its owner reads."""

from __future__ import annotations

from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.decision.start_check import (
    grant_of,
    validate_adjusted,
    validate_nodes,
    validate_restored,
    validate_staged,
    validate_start,
)
from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import Added, AddedNode, Adjusted, Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason, Refuse
from nri_gpu.ledger.grant_text import SignedGrant, sign_grant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import EnvironmentSettings, ForeignSettings, NamespaceRules, Otherwise, Policy
from nri_gpu.policy.rules import Rule, RuleList
from tests.support import builders as make

KEY: Final = bytes(range(32))
US: Final = "10-nri-gpu"
POLICY: Final = Policy.default()
IGNORING: Final = Policy(namespaces=NamespaceRules(allow=Globs(("web",)), otherwise=Otherwise.IGNORE))
ALLOWS: Final = Rule(allow=True, namespace=Globs(("ml",)))
IGNORES: Final = Rule(allow=False, namespace=Globs(("ml",)), otherwise=Otherwise.IGNORE)
BROKEN: Final = Policy.broken("policy.toml:3: wrong")
ASKING: Final = make.container("2")
QUIET: Final = make.container()
OPTED_OUT: Final = make.container("none")
OF_CLAIM: Final = make.container(markers={"NRI_GPU_CLAIM_X_0": "v1"})


def signed(*indices: int, to: Container = ASKING, key: bytes = KEY) -> str:
    return sign_grant(make.grant(*indices, to=to), key)


def node(minor: int, owner: str = US, name: str = "", major: int = 195) -> AddedNode:
    return AddedNode(name or f"/dev/nvidia{minor}", owner, major, minor)


def granted(*indices: int, to: Container = ASKING) -> Adjusted:
    """As the injector leaves it."""
    nodes = (
        *(node(7 - index) for index in indices),
        node(255, name="/dev/nvidiactl"),
        node(0, name="/dev/nvidia-uvm", major=511),
    )
    return Adjusted(container=to, grant=Added(signed(*indices, to=to), US), nodes=nodes)


STARTS: dict[str, tuple[Container, str | None, bytes | None, Policy, str]] = {
    "asked for none": (OPTED_OUT, None, None, POLICY, ""),
    "asked and granted": (ASKING, signed(0, 1), KEY, POLICY, ""),
    "asked, granted, and no policy any more": (ASKING, signed(0, 1), KEY, BROKEN, ""),
    "asked": (ASKING, None, KEY, POLICY, "it was not connected, or too late"),
    "asked, with a policy that is broken": (ASKING, None, KEY, BROKEN, "it was not connected, or too late"),
    "not understood": (make.container("tow"), None, KEY, POLICY, "it was not connected, or too late"),
    "may not ask, which is ignored": (ASKING, None, KEY, IGNORING, ""),
    "a rule ignores it": (ASKING, None, KEY, Policy(rule=RuleList((IGNORES, ALLOWS))), ""),
    "a rule allows it, the next would ignore it": (
        ASKING,
        None,
        KEY,
        Policy(rule=RuleList((ALLOWS, IGNORES))),
        "it was not connected, or too late",
    ),
    "a signed grant of another key": (ASKING, signed(0, key=bytes(32)), KEY, POLICY, "its mac does not match"),
    "a signed grant and no key": (ASKING, signed(0), None, POLICY, "no key on this node"),
    "another container's": (
        ASKING,
        signed(0, to=make.container("2", name="x")),
        KEY,
        POLICY,
        "does not match",
    ),
    "of a claim, and granted": (OF_CLAIM, signed(0, to=OF_CLAIM), KEY, POLICY, ""),
    "of a claim": (OF_CLAIM, None, KEY, POLICY, "NRI_GPU_CLAIM_X_0 asks for GPUs, but nri-gpu granted it none"),
    "of a claim, where its request is ignored": (OF_CLAIM, None, KEY, IGNORING, "NRI_GPU_CLAIM_X_0 asks for GPUs"),
    "of a claim, with a policy that is broken": (OF_CLAIM, None, KEY, BROKEN, "NRI_GPU_CLAIM_X_0 asks for GPUs"),
    "a signed grant of nobody's, and nothing asked": (QUIET, "v1;mac=x", KEY, POLICY, ""),
}


@pytest.mark.parametrize(("container", "text", "key", "policy", "words"), STARTS.values(), ids=STARTS)
def test_starts(container: Container, text: str | None, key: bytes | None, policy: Policy, words: str) -> None:
    reason = validate_start(container, grant_of(container, text, key), policy)
    assert (reason is not None) is bool(words)
    if reason:
        assert reason.code is Code.NOT_GRANTED
        assert words in reason.sentence
        assert "create it again once `nri-gpu run` serves this node." in reason.sentence


TOKEN: Final = {"gpu.nri.io/kubelet.nvidia.com_gpu": "v1;mac=x"}
BY_ENVIRONMENT: Final = Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",))))
VISIBLE: Final = {"NVIDIA_VISIBLE_DEVICES": "all"}
RESTORED: dict[str, tuple[Container, Policy, str]] = {
    "it asks": (ASKING, POLICY, "gpu.nri.io"),
    "it asks for none": (OPTED_OUT, POLICY, "gpu.nri.io"),
    "its request would be ignored": (ASKING, IGNORING, "gpu.nri.io"),
    "another of its pod asks": (
        make.container(pod=make.pod(annotations={"gpu.nri.io/container.x": "1"})),
        POLICY,
        "gpu.nri.io/container.x",
    ),
    "it has a claim's variable": (OF_CLAIM, POLICY, "NRI_GPU_CLAIM_X_0"),
    "it has the kubelet's token": (make.container(annotations=TOKEN), POLICY, "gpu.nri.io/kubelet.nvidia.com_gpu"),
    "the kubelet allocated to it": (make.container(kubelet=Allocated(key="claim ml/train")), POLICY, "claim ml/train"),
    "its environment asks": (make.container(env=VISIBLE), BY_ENVIRONMENT, "NVIDIA_VISIBLE_DEVICES"),
    "its environment may not ask": (make.container(env=VISIBLE), POLICY, ""),
    "nobody asks": (QUIET, POLICY, ""),
}


@pytest.mark.parametrize(("container", "policy", "key"), RESTORED.values(), ids=RESTORED)
def test_no_checkpoint_is_restored_in_a_pod_that_asks(container: Container, policy: Policy, key: str) -> None:
    assert validate_restored(container, policy) is None
    restored = replace(container, restored=True)
    decision = decide(restored, make.node(), Ledger(), policy)
    reason = validate_adjusted(Adjusted(container=restored, grant=Added(signed(0, to=restored), US)), KEY, policy)
    assert validate_restored(restored, policy) == (decision.reason if isinstance(decision, Refuse) else None) == reason
    assert (str(reason).startswith(f"nri-gpu [restored]: its pod asks for GPUs by {key}, and")) is bool(key)


def strangers(*nodes: AddedNode, **fields: Any) -> Adjusted:  # noqa: ANN401 - any other field of Adjusted
    """A container that asked for nothing, with what another plugin added."""
    return Adjusted(container=QUIET, nodes=nodes, **fields)


OTHER: Final = "20-other"
NODES_OF_MIG = (node(7), node(12, name="/dev/nvidia-caps/nvidia-cap12", major=509))
MIG: Final = make.mig_uuid(0, 0), make.mig_uuid(0, 1)


def of_mig(*capabilities: int, gpu: bool = True, more: tuple[str, ...] = ()) -> Adjusted:
    """Granted two MIG devices: the node of their GPU, and these capabilities. more: other GPUs of the grant."""
    signed = sign_grant(replace(make.grant(to=ASKING), uuids=(*MIG, *more)), KEY)
    nodes = [node(minor, name=f"/dev/nvidia-caps/nvidia-cap{minor}", major=509) for minor in capabilities]
    return Adjusted(container=ASKING, grant=Added(signed, US), nodes=(*([node(7)] if gpu else []), *nodes))


MONITORS: Final = sign_grant(make.grant(0, mode=None, to=OF_CLAIM), KEY)
GOOD = {
    "what others add is theirs": strangers(node(4, OTHER, "/dev/fuse", 10), cdi_devices=(Added("a.com/b=c", "x"),)),
    "granted": granted(0, 1),
    "granted a MIG device: the node of its GPU": replace(granted(0), nodes=NODES_OF_MIG),
    "granted two MIG devices of one GPU": of_mig(12, 13, 21, 22),
    "granted two MIG devices of one GPU instance": of_mig(12, 13, 14),
    "none, and a signed grant of nothing": Adjusted(
        container=OPTED_OUT, grant=Added(sign_grant(make.grant(mode=None, to=OPTED_OUT), KEY), US)
    ),
    "of a claim, for monitoring": replace(granted(0, to=OF_CLAIM), grant=Added(MONITORS, US)),
    "of a claim, and privileged": replace(
        granted(0, to=replace(OF_CLAIM, privileged=True)), nodes=(node(255, name="/dev/nvidiactl"),)
    ),
    "granted on a simulated node": replace(granted(0), nodes=(node(0, major=1195),)),
    "a runtime that names no owner": replace(granted(0), grant=Added(signed(0), ""), nodes=(node(7, ""),)),
}


@pytest.mark.parametrize("adjusted", GOOD.values(), ids=GOOD)
def test_what_may_be_created(adjusted: Adjusted) -> None:
    assert validate_adjusted(adjusted, KEY, POLICY) is None


NOT_GRANTED, UNGRANTED, INCOMPLETE = Code.NOT_GRANTED, Code.UNGRANTED_NODES, Code.INCOMPLETE_GRANT
MADE_UP = Added("v1;mode=exclusive;uuid=GPU-0;gen=;mac=00", OTHER)
SIMULATED = tuple(node(minor, major=1195) for minor in range(2))
BAD: dict[str, tuple[Adjusted, Code, str]] = {
    "asked and got nothing": (Adjusted(container=ASKING), NOT_GRANTED, "nri-gpu granted it none"),
    "asked, and another plugin served it": (
        Adjusted(container=ASKING, nodes=(node(0, OTHER),)),
        NOT_GRANTED,
        "nri-gpu granted it none",
    ),
    "a made-up grant": (replace(granted(0), grant=MADE_UP), NOT_GRANTED, "its mac does not match"),
    "another plugin adds a GPU": (
        replace(granted(0), nodes=(node(7), node(6, OTHER))),
        UNGRANTED,
        "NRI plugin 20-other added /dev/nvidia6 to this container",
    ),
    "under another name": (strangers(node(0, OTHER, "/dev/harmless")), UNGRANTED, "added /dev/harmless"),
    "under another number": (strangers(node(0, OTHER, "/dev/nvidia-uvm", 511)), UNGRANTED, "added /dev/nvidia-uvm"),
    "to one that opted out": (
        replace(granted(to=OPTED_OUT), nodes=(node(0, OTHER),)),
        UNGRANTED,
        "its grant is another plugin's",
    ),
    "by a name of CDI of any class of NVIDIA's": (
        strangers(cdi_devices=(Added("k8s.gpu.nvidia.com/claim=x", OTHER),)),
        UNGRANTED,
        "added k8s.gpu.nvidia.com/claim=x",
    ),
    "by a rule of the device cgroup": (
        strangers(opened=frozenset({195})),
        UNGRANTED,
        "a device rule for major 195",
    ),
    "more of our own than the signed grant names": (
        replace(granted(0), nodes=tuple(map(node, range(3)))),
        UNGRANTED,
        "the nodes of 3 GPUs were added to this container, but its grant names 1",
    ),
    "more than is monitored": (
        replace(granted(0, 1, to=OF_CLAIM), grant=Added(MONITORS, US)),
        UNGRANTED,
        "the nodes of 2 GPUs were added to this container, but its grant names 1",
    ),
    "of a claim and got nothing": (Adjusted(container=OF_CLAIM), NOT_GRANTED, "NRI_GPU_CLAIM_X_0 asks for GPUs"),
    "less than the signed grant names": (
        replace(granted(0), grant=Added(signed(0, 1), US)),
        INCOMPLETE,
        "lacks nodes of its GPUs (its grant names 2): an NRI plugin removed them, which",
    ),
    "less, and the runtime says why": (
        replace(granted(0), grant=Added(signed(0, 1), US), removed=(Added("/x", "7-y"), Added("/dev/nvidia6", OTHER))),
        INCOMPLETE,
        "NRI plugin 20-other removed /dev/nvidia6, which nri-gpu had added",
    ),
    "less than is monitored": (
        replace(granted(to=OF_CLAIM), grant=Added(MONITORS, US)),
        INCOMPLETE,
        "lacks nodes of its GPUs (its grant names 1)",
    ),
    "a MIG device without its GPU": (
        of_mig(12, 13, 21, 22, gpu=False),
        INCOMPLETE,
        "lacks nodes of its GPUs (its grant names 2)",
    ),
    "a MIG device without its capability": (of_mig(12, 13), INCOMPLETE, "lacks nodes of its GPUs (its grant names 2)"),
    "a block device in the place of a GPU's node": (replace(granted(0), nodes=()), INCOMPLETE, "lacks nodes"),
    "more of a simulated node's": (replace(granted(0), nodes=SIMULATED), UNGRANTED, "the nodes of 2 GPUs"),
}


@pytest.mark.parametrize(("adjusted", "code", "words"), BAD.values(), ids=BAD)
def test_what_may_not_be_created(adjusted: Adjusted, code: Code, words: str) -> None:
    reason = validate_adjusted(adjusted, KEY, POLICY)
    assert reason
    assert reason.code is code
    assert words in reason.sentence


def existing(adjusted: Adjusted) -> Container:
    """The same container, as the runtime shows it later."""
    return replace(adjusted.container, devices=adjusted.devices)


@pytest.mark.parametrize("adjusted", GOOD.values(), ids=GOOD)
def test_what_was_created_right_starts(adjusted: Adjusted) -> None:
    grant = grant_of(adjusted.container, adjusted.grant.name if adjusted.grant else None, KEY)
    assert not isinstance(grant, SignedGrant) or validate_nodes(existing(adjusted), grant) is None


@pytest.mark.parametrize("name", [name for name, (_, code, _) in BAD.items() if code is INCOMPLETE])
def test_what_lacks_nodes_does_not_start(name: str) -> None:
    adjusted = BAD[name][0]
    assert adjusted.grant
    grant = grant_of(adjusted.container, adjusted.grant.name, KEY)
    assert isinstance(grant, SignedGrant)
    reason = validate_nodes(existing(adjusted), grant)
    assert reason
    assert "lacks nodes of its GPUs" in reason.sentence


def test_a_container_of_which_the_drivers_files_were_removed() -> None:
    """What the pod itself mounts of them counts, too; another generation does not."""
    adjusted = replace(granted(0), staged=frozenset({"a"}), removed=(Added("/dev/nvidia6", "x"), Added("/usr", OTHER)))
    assert validate_staged(adjusted, frozenset()) is None
    assert validate_staged(adjusted, frozenset({"a"})) is None
    assert (
        validate_staged(replace(adjusted, container=replace(ASKING, staged=frozenset("b"))), frozenset({"a", "b"}))
        is None
    )
    reason = validate_staged(adjusted, frozenset({"b"}))
    assert reason
    assert "lacks the mounts of the driver's files: NRI plugin 20-other removed /usr" in reason.sentence


def test_strangers_matter_to_the_guard_alone() -> None:
    theirs = strangers(node(0, OTHER))
    assert validate_adjusted(theirs, KEY, POLICY)
    assert validate_adjusted(theirs, KEY, POLICY, ungranted=False) is None
    both = replace(granted(0), nodes=(node(7), node(6, OTHER)))
    assert validate_adjusted(both, KEY, POLICY, ungranted=False)


def test_what_is_added_to_a_monitor_is_let_pass() -> None:
    """Granted or not; but one that asks needs its own grant all the same."""
    policy = replace(POLICY, foreign=ForeignSettings(monitors=Globs(("ml/*",))))
    for adjusted in (strangers(node(0, OTHER)), replace(granted(0), nodes=(node(7), node(6, OTHER)))):
        assert validate_adjusted(adjusted, KEY, POLICY)
        assert validate_adjusted(adjusted, KEY, policy) is None
    reason = validate_adjusted(replace(strangers(node(0, OTHER)), container=ASKING), KEY, policy)
    assert reason
    assert reason.code is NOT_GRANTED


def test_sentences_keep_their_length_whatever_a_plugin_is_called() -> None:
    hostile = AddedNode("/dev/nvidia" + "0" * 5000, "99-" + "\u00e9\n" * 5000, 195, 0)
    reason = validate_adjusted(Adjusted(container=QUIET, nodes=(hostile,)), KEY, POLICY)
    assert isinstance(reason, Reason)
    assert len(str(reason)) < REFUSAL_MAX
    assert str(reason).endswith("or its request from the container.")
    assert "\n" not in str(reason)
