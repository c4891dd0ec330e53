"""Containers with another component's GPUs: who is given what it lacks, what they may ask, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container, DeviceRef
from nri_gpu.domain.decision import Code, Inject, Pass
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.node import Majors, Node
from nri_gpu.ledger.ledger import Ledger
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


ONLY_SHAPING = ["1", "2", "count=2", "device=1", f"device={make.uuid(3)}", "device=1,3", "1; mode=shared", "arch>=8.0"]
ONLY_SHAPING += ["all", "all; capabilities=compute", "all; mode=shared", "all; arch>=8.0"]


@pytest.mark.parametrize("claim", ONLY_SHAPING)
def test_a_claim_within_what_it_holds_is_fine(claim: str) -> None:
    assert completed(holding(1, 3, claim=claim), policy=ASKED).completes == (make.uuid(1), make.uuid(3))


def test_the_annotation_shapes() -> None:
    decision = completed(holding(2, claim="1; capabilities=utility"), policy=ASKED)
    assert list(decision.edits.devices) == ["/dev/nvidiactl"]
    drawing = completed(holding(2, claim="1; capabilities=graphics"), policy=ASKED)
    assert list(drawing.edits.devices) == ["/dev/nvidiactl", "/dev/nvidia-modeset"]


CLOSED = replace(ASKED, namespaces=NamespaceRules(deny=Globs(("ml",))))
STARTING = Node(number=1, inventory=make.inventory((), majors=Majors(), fault="just started"))
STRANGE = (DeviceRef("/dev/nvidia9", 195, 9),)
CUT = make.mig_gpu(1)
CUT_NODE = make.node([make.gpu(0), CUT])


def cut(*places: int, claim: str | None = None) -> Container:
    """A container that a device plugin gave these MIG devices of GPU 1."""
    minors = [m for at in places for m in (CUT.mig[at].gpu_instance_minor, CUT.mig[at].compute_instance_minor) if m]
    caps = (DeviceRef(f"/dev/nvidia-caps/nvidia-cap{minor}", 510, minor) for minor in minors)
    return make.container(claim, devices=(make.held_node(CUT), *caps))


def test_who_does_not_ask_is_completed_by_all_alone() -> None:
    assert completed(holding(0)).rule == "foreign.complete"
    assert completed(holding(0), policy=replace(CLOSED, foreign=ALL.foreign))  # a device plugin's is not asked by us


def test_a_mig_device_is_completed_by_its_own_uuid() -> None:
    decision = completed(cut(1, claim="1"), CUT_NODE, ASKED)
    assert decision.edits.env["NVIDIA_VISIBLE_DEVICES"] == make.mig_uuid(1, 1)
    assert list(decision.edits.devices) == SHARED
    assert completed(cut(1, claim="mig=1g.5gb"), CUT_NODE, ASKED)
    assert completed(cut(1, claim="all; capabilities=compute"), CUT_NODE, ASKED).completes == (make.mig_uuid(1, 1),)


CDI: dict[str, Any] = {"cdi_devices": ("nvidia.com/gpu=0",)}
HOOKS: dict[str, Any] = {"nvidia_hooks": frozenset({"nvidia-cdi-hook"})}
LEFT_ALONE: dict[str, tuple[Container, Node, Policy, str]] = {
    "policy completes nobody": (holding(0), NODE, NONE, ""),
    "policy completes who asks": (holding(0), NODE, ASKED, ""),
    "no good policy": (holding(0), NODE, Policy.broken("broken"), ""),
    "others bring it by CDI": (holding(0, **CDI), NODE, ALL, ""),
    "others bring it by hooks": (holding(0, **HOOKS), NODE, ALL, ""),
    "privileged": (holding(0, privileged=True), NODE, ALL, ""),
    "the node starts, and nobody asked": (holding(0), STARTING, ASKED, ""),
    "a GPU that nobody knows": (holding(0, more=STRANGE), NODE, ALL, "/dev/nvidia9"),
    "a GPU in MIG mode, without rights": (cut(), CUT_NODE, ALL, ""),
    "the same by another name": (
        make.container(devices=(make.held_node(CUT, "/dev/gpu"),)),
        CUT_NODE,
        ALL,
        "not completed: what it holds belongs to no GPU known here",
    ),
}


@pytest.mark.parametrize(("container", "node", "policy", "why"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(container: Container, node: Node, policy: Policy, why: str) -> None:
    decision = decide(container, node, Ledger(), policy)
    assert isinstance(decision, Pass)
    assert decision.edits == NO_EDITS
    assert why in decision.why


HELD, NOT_READY = Code.HELD_BY_OTHERS, Code.NODE_NOT_READY
SHAPES = "already holds /dev/nvidia6, /dev/nvidia4"
MORE = ["3", "device=0", "device=0,1", "mig=1g.5gb", "model=*H100*", "1; mode=exclusive", "2; extras=drm"]
MORE += ["all; mode=exclusive", "all; model=*H100*", "all; extras=drm"]
REQUIRING = {"NVIDIA_REQUIRE_CUDA": "cuda>=99"}
REFUSED: dict[str, tuple[Container, Node, Policy, Code, str]] = {
    "by default who asks": (holding(0, claim="1"), NODE, NONE, HELD, ""),
    "who wants none": (holding(0, claim="none"), NODE, ALL, HELD, ""),
    **{f"more, or others: {claim}": (holding(1, 3, claim=claim), NODE, ASKED, HELD, SHAPES) for claim in MORE},
    "another GPU": (
        holding(1, claim="device=9"),
        NODE,
        ASKED,
        HELD,
        "a request can only shape GPUs that another component assigned",
    ),
    "who may not ask": (holding(0, claim="1"), NODE, CLOSED, Code.NOT_ALLOWED, ""),
    "others bring it by CDI": (holding(0, claim="1", **CDI), NODE, ASKED, HELD, ""),
    "others bring it by hooks": (holding(0, claim="1", **HOOKS), NODE, ASKED, HELD, ""),
    "the node starts": (holding(0), STARTING, ALL, NOT_READY, ""),
    "the node starts, and it asks": (holding(0, claim="1"), STARTING, ASKED, NOT_READY, ""),
    "no module": (holding(0), make.node(majors=Majors(nvidia=195)), ALL, NOT_READY, "modprobe nvidia-uvm"),
    "an unknown GPU beside": (holding(0, claim="1", more=STRANGE), NODE, ASKED, HELD, "/dev/nvidia9"),
    "an unknown GPU": (holding(claim="1", more=STRANGE), NODE, NONE, HELD, "/dev/nvidia9"),
    "an unknown GPU, and none is wanted": (holding(claim="none", more=STRANGE), NODE, NONE, HELD, "/dev/nvidia9"),
    "two MIG devices": (cut(1, claim="mig=1g.5gb:2"), CUT_NODE, ASKED, HELD, ""),
    "another MIG device": (cut(1, claim="device=1:0"), CUT_NODE, ASKED, HELD, ""),
    "a whole GPU": (cut(1, claim="device=0"), CUT_NODE, ASKED, HELD, ""),
    "a GPU in MIG mode, without rights": (cut(claim="1"), CUT_NODE, ASKED, HELD, ""),
    "what the image requires": (holding(0, env=REQUIRING), NODE, ALL, Code.REQUIREMENT_NOT_MET, ""),
}


@pytest.mark.parametrize(("container", "node", "policy", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(container: Container, node: Node, policy: Policy, code: Code, words: str) -> None:
    reason = deciding.refused(container, node, policy=policy)
    assert reason.code is code
    assert words in reason.sentence
