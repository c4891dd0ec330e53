"""Containers that hold GPU nodes from another component, such as a device plugin, CDI or another NRI plugin.

Two injectors never serve one container. Where policy says so (`foreign.complete`), such a container gets what it lacks
to use its GPUs: driver libraries, shared nodes and environment, and never another GPU.
"""

from __future__ import annotations

from msgspec import Struct

from nri_gpu.allocation.external import beyond, completable, foreign_units, nvidia_names, nvidia_nodes, unknown_nodes
from nri_gpu.decision.eligibility import Eligible, node_fault
from nri_gpu.decision.plan import plan_for, unreached_note
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Grant, Inject, Reason
from nri_gpu.domain.gpu import Capabilities, closure
from nri_gpu.domain.node import Node
from nri_gpu.policy.model import Complete, Policy
from nri_gpu.policy.select import Terms


def held_elsewhere(container: Container, node: Node) -> Reason | None:
    """Why a container that carries another component's GPU nodes is refused, even with `none`: they would go unseen."""
    if not (container.devices or container.opened or container.cdi_devices):
        return None
    # A node of an unknown GPU counts too: the inventory may be new, or have lost a GPU that a device plugin assigned.
    held = "" if container.privileged else nvidia_nodes(container, node) or unknown_nodes(container, node)
    if not (held := held or nvidia_names(container)):
        return None
    return Reason(
        Code.HELD_BY_OTHERS,
        f"the container already holds {held}, put there by a device plugin, CDI or another NRI plugin: two "
        "injectors never serve one container; drop its resource request or its gpu.nri.io annotation.",
    )


class NotCompleted(Struct, frozen=True):
    """The container is left as it is. why: for the log; empty where policy completes no such container."""

    why: str = ""


def complete_unasked(container: Container, node: Node, policy: Policy) -> Inject | Reason | NotCompleted:
    """What a container without a request lacks to use the GPUs that it holds already."""
    if policy.foreign.complete is not Complete.ALL or not completable(container, node):
        return NotCompleted()
    capabilities = closure(policy.defaults.capabilities)
    if sentence := Terms(policy=policy).denied_capabilities(capabilities):
        return Reason(Code.NOT_ALLOWED, sentence)
    if reason := node_fault(capabilities, node):
        return reason
    unknown = unknown_nodes(container, node)
    if unknown or not foreign_units(container, node):
        return NotCompleted(f"not completed: {unknown or 'what it holds'} is of no GPU known here")
    return _completed(container, capabilities, node, policy, "foreign.complete")


def complete_asked(asked: Eligible, container: Container, node: Node) -> Inject | Reason | None:
    """The same for a container with a request, which may only shape what it holds.

    None where the container holds no other component's GPUs.
    """
    reason = held_elsewhere(container, node)
    policy = asked.terms.policy
    if reason is None or policy.foreign.complete is Complete.NONE or not completable(container, node):
        return reason
    if reason := node_fault(asked.capabilities, node):
        return reason
    unknown, held = unknown_nodes(container, node), foreign_units(container, node)
    if unknown or not held:
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {unknown or 'a GPU in MIG mode'}, assigned by another component and of no "
            "GPU or MIG device known on this node, so it cannot be completed: see `nri-gpu gpus` there, or drop its "
            "gpu.nri.io annotation.",
        )
    if more := beyond(asked.claim, container, held, node.inventory):
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {nvidia_nodes(container, node)}, put there by a device plugin or another NRI "
            f"plugin, and {asked.claim.key} asks for {more}: a request can only shape GPUs that another component "
            "assigned, so ask for no more than those.",
        )
    return _completed(container, asked.capabilities, node, policy, asked.rule)


def _completed(
    container: Container, capabilities: Capabilities, node: Node, policy: Policy, rule: str
) -> Inject | Reason:
    """A grant of no GPU, since none of them is ours to grant."""
    held = foreign_units(container, node)
    plan = plan_for(container, held, capabilities, node, policy, completes=True)
    if isinstance(plan, Reason):
        return plan
    grant = Grant.to(container, (), None, plan.generation)
    note = unreached_note(container, plan.edits)
    completes = tuple(unit.uuid for unit in held)
    return Inject(plan.edits, grant, rule, note=note, compat=plan.compat, completes=completes)
