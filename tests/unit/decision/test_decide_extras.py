"""Extras in a decision: policy first, then what the node has; with a grant or not at all."""

from __future__ import annotations

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Inject, Reason
from nri_gpu.domain.edits import DeviceNode, Extra, NodeExtra
from nri_gpu.domain.gpu import DrmNode
from nri_gpu.policy.model import ClaimDefaults, ExtraRules, Policy
from tests.support import builders as make
from tests.unit.decision import deciding

GDR = DeviceNode("/dev/gdrdrv", 1521, 0)
GPUS = tuple(make.gpu(index, drm=(DrmNode(f"card{index}", 226, index),)) for index in range(2))
NODE = make.node(
    GPUS,
    extras={
        Extra.GDRCOPY: NodeExtra((GDR,)),
        Extra.RDMA: NodeExtra((DeviceNode("/dev/infiniband/uverbs0", 231, 192),)),
    },
)
ALLOWING = Policy(extras=ExtraRules(allowed=frozenset(Extra)))


def injected(container: Container, policy: Policy = ALLOWING) -> Inject:
    return deciding.injected(container, NODE, policy=policy)


def refused(container: Container, policy: Policy = ALLOWING) -> Reason:
    return deciding.refused(container, NODE, policy=policy)


def test_what_policy_does_not_list_is_refused_before_anybody_looks_for_it() -> None:
    reason = refused(make.container("1;extras=gdrcopy,fabricmanager"), Policy())
    assert (reason.code, "extras gdrcopy, fabricmanager may not be asked for" in reason.sentence) == (
        Code.NOT_ALLOWED,
        True,
    )
    assert refused(make.container("1;extras=fabricmanager")).code is Code.NODE_NOT_READY


def test_a_limit_of_the_containers_own_is_told_of() -> None:
    decision = injected(make.container("1;extras=rdma", rlimits=frozenset({"RLIMIT_MEMLOCK"})))
    assert "RLIMIT_MEMLOCK" in decision.note
    assert not decision.edits.rlimits


def test_policy_gives_extras_to_whoever_names_none() -> None:
    gifts = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.DRM})))
    assert "/dev/dri/card0" in injected(make.container("device=0"), gifts).edits.devices


def test_who_names_what_is_no_extra_any_more_gets_no_more_for_it() -> None:
    """It named extras, so the policy's gifts are not for it; and it is not refused, whatever the policy lists."""
    gifts = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.DRM})), extras=ExtraRules(allowed=frozenset()))
    named = injected(make.container("device=0;extras=profile"), gifts)
    plain = injected(make.container("device=0"), Policy())
    assert named.edits == plain.edits
    assert "extra profile no longer exists" in named.note


def test_what_policy_gives_it_must_also_allow() -> None:
    torn = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.RDMA})))
    assert refused(make.container("1"), torn).code is Code.NOT_ALLOWED
