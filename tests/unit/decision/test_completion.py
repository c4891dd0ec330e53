"""Containers with another component's GPUs: who is given what it lacks, what they may ask, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.external import unknown_nodes
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, DeviceRef
from nri_gpu.domain.decision import Code, Inject, Pass, Reason
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.node import Majors, Node
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Complete, ForeignSettings, NamespaceRules, Policy
from tests.support import builders as make
from tests.unit.decision import deciding

NONE, ASKED, ALL = (Policy(foreign=ForeignSettings(complete=each)) for each in Complete)
NODE = make.node()
SHARED = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


def holding(*indices: int, claim: str | None = None, more: tuple[DeviceRef, ...] = (), **fields: Any) -> Container:  # noqa: ANN401
    """A container that a device plugin gave these GPUs of the node."""
    held = tuple(make.held_node(make.gpu(index)) for index in indices)
    return make.container(claim, devices=(*held, *more), **fields)


def completed(container: Container, node: Node = NODE, policy: Policy = ALL) -> Inject:
    decision = deciding.injected(container, node, policy=policy)
    assert (decision.grant.uuids, decision.grant.mode) == ((), None)
    assert decision.completes
    return decision


def refused(container: Container, node: Node = NODE, policy: Policy = ASKED) -> Reason:
    return deciding.refused(container, node, policy=policy)


def test_the_annotation_shapes() -> None:
    decision = completed(holding(2, claim="1; capabilities=utility"), policy=ASKED)
    assert list(decision.edits.devices) == ["/dev/nvidiactl"]
    drawing = completed(holding(2, claim="1; capabilities=graphics"), policy=ASKED)
    assert list(drawing.edits.devices) == ["/dev/nvidiactl", "/dev/nvidia-modeset"]


def test_who_does_not_ask_is_completed_by_all_alone() -> None:
    assert completed(holding(0)).rule == "foreign.complete"
    for policy in (NONE, ASKED, Policy.broken("broken")):
        decision = decide(holding(0), NODE, Ledger(), policy)
        assert isinstance(decision, Pass)
        assert decision.edits == NO_EDITS


def test_by_default_who_asks_is_refused() -> None:
    assert refused(holding(0, claim="1"), policy=NONE).code is Code.HELD_BY_OTHERS
    assert refused(holding(0, claim="none"), policy=ALL).code is Code.HELD_BY_OTHERS


ONLY_SHAPING = ["1", "2", "count=2", "device=1", f"device={make.uuid(3)}", "device=1,3", "1; mode=shared", "arch>=8.0"]
MORE = ["3", "device=0", "device=0,1", "all", "mig=1g.5gb", "model=*H100*", "1; mode=exclusive", "device=9"]
MORE += ["2; extras=drm"]


@pytest.mark.parametrize("claim", ONLY_SHAPING)
def test_a_claim_within_what_it_holds_is_fine(claim: str) -> None:
    assert completed(holding(1, 3, claim=claim), policy=ASKED).completes == (make.uuid(1), make.uuid(3))


@pytest.mark.parametrize("claim", MORE)
def test_a_claim_for_more_or_others_is_refused(claim: str) -> None:
    reason = refused(holding(1, 3, claim=claim))
    assert reason.code is Code.HELD_BY_OTHERS
    assert "already holds /dev/nvidia6, /dev/nvidia4" in reason.sentence
    assert "a request can only shape GPUs that another component assigned" in reason.sentence


def test_all_is_fine_where_it_holds_all() -> None:
    assert completed(holding(0, 1, 2, 3, claim="all"), policy=ASKED)


def test_policy_still_says_who_may_ask() -> None:
    closed = replace(ASKED, namespaces=NamespaceRules(deny=Globs(("ml",))))
    assert refused(holding(0, claim="1"), policy=closed).code is Code.NOT_ALLOWED
    assert completed(holding(0), policy=replace(closed, foreign=ALL.foreign))  # a device plugin's is not asked by us


BROUGHT = {
    "CDI names": {"cdi_devices": ("nvidia.com/gpu=0",)},
    "hooks of NVIDIA's": {"nvidia_hooks": frozenset({"nvidia-cdi-hook"})},
    "privileged": {"privileged": True},
}


@pytest.mark.parametrize("fields", BROUGHT.values(), ids=BROUGHT)
def test_whom_others_serve_whole_is_left_alone(fields: dict[str, Any]) -> None:
    decision = decide(holding(0, **fields), NODE, Ledger(), ALL)
    assert isinstance(decision, Pass)
    assert decision.edits == NO_EDITS
    if "privileged" not in fields:
        assert refused(holding(0, claim="1", **fields)).code is Code.HELD_BY_OTHERS


def test_a_node_that_is_not_ready_completes_nobody_and_says_so() -> None:
    starting = Node(number=1, inventory=make.inventory((), majors=Majors(), fault="just started"))
    for container, policy in ((holding(0), ALL), (holding(0, claim="1"), ASKED)):
        assert refused(container, starting, policy).code is Code.NODE_NOT_READY
    assert isinstance(decide(holding(0), starting, Ledger(), ASKED), Pass)
    unloaded = make.node(majors=Majors(nvidia=195))
    assert "modprobe nvidia-uvm" in refused(holding(0), unloaded, ALL).sentence


STRANGE = (DeviceRef("/dev/nvidia9", 195, 9),)


def test_a_gpu_that_nobody_knows_is_not_completed() -> None:
    strange = holding(0, more=STRANGE)
    assert unknown_nodes(strange, NODE) == "/dev/nvidia9"
    decision = decide(strange, NODE, Ledger(), ALL)
    assert isinstance(decision, Pass)
    assert "/dev/nvidia9" in decision.why
    reason = refused(holding(0, claim="1", more=STRANGE))
    assert (reason.code, "/dev/nvidia9" in reason.sentence) == (Code.HELD_BY_OTHERS, True)


def test_by_default_it_is_given_no_other_either() -> None:
    for claim in ("1", "none"):
        reason = refused(make.container(claim, devices=STRANGE), policy=NONE)
        assert (reason.code, "/dev/nvidia9" in reason.sentence) == (Code.HELD_BY_OTHERS, True)


CUT = make.mig_gpu(1)
CUT_NODE = make.node([make.gpu(0), CUT])


def caps(*places: int) -> tuple[DeviceRef, ...]:
    minors = [m for at in places for m in (CUT.mig[at].gpu_instance_minor, CUT.mig[at].compute_instance_minor) if m]
    return (make.held_node(CUT), *(DeviceRef(f"/dev/nvidia-caps/nvidia-cap{minor}", 510, minor) for minor in minors))


def test_a_mig_device_is_completed_by_its_own_uuid_and_gets_no_other() -> None:
    decision = completed(make.container("1", devices=caps(1)), CUT_NODE, ASKED)
    assert decision.edits.env["NVIDIA_VISIBLE_DEVICES"] == make.mig_uuid(1, 1)
    assert list(decision.edits.devices) == SHARED
    assert completed(make.container("mig=1g.5gb", devices=caps(1)), CUT_NODE, ASKED)
    for claim in ("mig=1g.5gb:2", "device=1:0", "device=0", "all"):
        assert refused(make.container(claim, devices=caps(1)), CUT_NODE).code is Code.HELD_BY_OTHERS


def test_a_gpu_in_mig_mode_without_rights_is_of_no_use() -> None:
    assert isinstance(decide(make.container(devices=caps()), CUT_NODE, Ledger(), ALL), Pass)
    unnamed = decide(make.container(devices=(make.held_node(CUT, "/dev/gpu"),)), CUT_NODE, Ledger(), ALL)
    assert isinstance(unnamed, Pass)
    assert unnamed.why == "not completed: what it holds is of no GPU known here"
    assert refused(make.container("1", devices=caps()), CUT_NODE).code is Code.HELD_BY_OTHERS


def test_what_the_image_requires_holds_for_it_too() -> None:
    assert refused(holding(0, env={"NVIDIA_REQUIRE_CUDA": "cuda>=99"}), policy=ALL).code is Code.REQUIREMENT_NOT_MET
