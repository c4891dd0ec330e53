"""Pods in virtual machines, by their runtime handler: who would be given GPUs is refused, and nobody else."""

from __future__ import annotations

from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.decision.start_check import grant_of, validate_start
from nri_gpu.domain.allocation import Allocated, AllocatedDevice, ClaimUid
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Inject, Pass
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.forms import NOTHING, Globs
from nri_gpu.policy.model import (
    Complete,
    EnvironmentSettings,
    ForeignSettings,
    NamespaceRules,
    Otherwise,
    Policy,
    RuntimeRules,
)
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.policy.rules import Rule, RuleList
from tests.support import builders as make
from tests.unit.decision.deciding import NODE, injected, refused

KEY: Final = bytes(range(32))
POLICY: Final = Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",))), mps=MpsSettings(enabled=True))
ANY: Final = replace(POLICY, runtimes=RuntimeRules(refuse=NOTHING))
VM: Final = "kata-qemu-nvidia-gpu"


def given(**more: Any) -> Allocated:  # noqa: ANN401 - of an Allocated
    return Allocated((AllocatedDevice("nvidia.com/gpu", make.uuid(2)),), **more)


# How a container asks for GPUs that we would give it.
WAYS: Final[dict[str, dict[str, Any]]] = {
    "annotation": {"claim": "1"},
    "MPS": {"claim": "1;mode=mps"},
    "device plugin": {"kubelet": given()},
    "device plugin, shaped by an annotation": {"claim": "all", "kubelet": given()},
    "claim": {"kubelet": given(claims=(ClaimUid("c"),)), "cdi_devices": ("gpu.nri.io/claim=c",)},
    "claim for monitoring": {"kubelet": given(claims=(ClaimUid("c"),), admin=True)},
    "environment": {"env": {"NVIDIA_VISIBLE_DEVICES": "2"}},
}


def on(handler: str, claim: str | None = None, **fields: Any) -> Container:  # noqa: ANN401 - of a Container
    container = make.container(claim, **fields)
    return replace(container, pod=replace(container.pod, runtime_handler=handler))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_way_is_closed_to_a_virtual_machine_and_to_nobody_else(way: dict[str, Any]) -> None:
    assert refused(on(VM, **way), policy=POLICY).code is Code.BAD_RUNTIME
    assert injected(on(VM, **way), policy=ANY).grant.uuids
    for handler in ("", "runc", "not-kata"):
        assert injected(on(handler, **way), policy=POLICY).grant.uuids


def test_a_pod_without_a_handler_fits_no_pattern() -> None:
    everything = Policy(runtimes=RuntimeRules(refuse=Globs(("*",))))
    assert injected(on("", "1"), policy=everything).grant.uuids
    assert refused(on("runc", "1"), policy=everything).code is Code.BAD_RUNTIME


def test_the_sentence() -> None:
    policy = replace(Policy(runtimes=RuntimeRules(refuse=Globs(("vm", "kata*")))), source="/etc/p.toml")
    assert str(refused(on(VM, "1"), policy=policy)) == (
        f'nri-gpu [bad-runtime]: its pod\'s runtime handler "{VM}" starts a virtual machine, in which a device node of '
        "the host leads to no GPU (runtimes.refuse[1] in /etc/p.toml): use another RuntimeClass, or take this handler "
        "out of that list if it starts no virtual machine."
    )
    assert refused(on("kata-" + "x" * 300, "1"), policy=policy).fits


IGNORES: Final = RuleList((Rule(allow=False, runtime_handler=Globs(("kata*",)), otherwise=Otherwise.IGNORE),))
PASSES: Final[dict[str, tuple[Container, Policy]]] = {
    "asks for nothing": (on(VM), POLICY),
    "asks by a variable that is no request there": (on(VM, env={"NVIDIA_VISIBLE_DEVICES": "all"}), Policy()),
    "a passthrough device plugin's": (on(VM, cdi_devices=("nvidia.com/pgpu=0",)), POLICY),
    "another component's GPU": (on(VM, devices=(make.held_node(NODE.gpus[0]),)), POLICY),
    "a rule ignores it": (on(VM, env={"NVIDIA_VISIBLE_DEVICES": "2"}), replace(POLICY, rule=IGNORES)),
    "its namespace is ignored": (
        on(VM, "1"),
        Policy(namespaces=NamespaceRules(allow=NOTHING, otherwise=Otherwise.IGNORE)),
    ),
}


@pytest.mark.parametrize(("container", "policy"), PASSES.values(), ids=PASSES)
def test_what_we_would_give_nothing_passes_untouched(container: Container, policy: Policy) -> None:
    decision = decide(container, NODE, Ledger(), policy)
    assert isinstance(decision, Pass)
    assert decision.edits == NO_EDITS


def test_none_is_still_granted_and_what_others_gave_is_theirs() -> None:
    assert injected(on(VM, "none"), policy=POLICY).grant.uuids == ()
    holding, completing = (make.held_node(NODE.gpus[0]),), Policy(foreign=ForeignSettings(complete=Complete.ALL))
    decision = decide(on(VM, "all", devices=holding), NODE, Ledger(), completing)
    assert isinstance(decision, Inject)
    assert decision.completes
    assert refused(on(VM, "1", devices=holding), policy=POLICY).code is Code.HELD_BY_OTHERS


@pytest.mark.parametrize("way", [{"claim": "1"}, {"markers": {"NRI_GPU_CLAIM_X_0": "v1"}}], ids=["annotation", "claim"])
def test_who_was_granted_nothing_does_not_start_and_reads_the_same_sentence(way: dict[str, Any]) -> None:
    """As the guard asks it, which knows what the runtime shows; a grant from before the list was changed holds."""
    container = on(VM, **way)
    reason = validate_start(container, None, POLICY)
    assert reason == refused(on(VM, "1"), policy=POLICY)
    for policy in (ANY, Policy.broken("policy.toml:3: wrong")):
        other = validate_start(container, None, policy)
        assert other
        assert other.code is Code.NOT_GRANTED
    assert validate_start(on(VM), None, POLICY) is None
    signed = sign_grant(make.grant(0, to=container), KEY)
    assert validate_start(container, grant_of(container, signed, KEY), POLICY) is None
