"""The plan of what a container is given for GPUs that are settled, by us or by another component.

Its image's requirements are checked, then its edits planned.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.decision.cordoned import first_out_of_use
from nri_gpu.decision.cuda_choice import DRIVERS_OWN, CompatChoice, choose, with_compat
from nri_gpu.decision.driver_parts import driver_parts
from nri_gpu.decision.eligible import Eligible, lacking_library, node_fault
from nri_gpu.decision.foreign import beyond, completable, external_units, nvidia_names, nvidia_nodes, unknown_nodes
from nri_gpu.decision.refusals import called, cannot, why_not
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Grant, Inject, Reason
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.gpu import Capabilities, Capability, Unit, closure, gpus_of
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import DriverTree, Node
from nri_gpu.injection.device_nodes import covered_node
from nri_gpu.injection.driver_mounts import compat_hindrance
from nri_gpu.injection.inject import Injection, plan
from nri_gpu.policy.model import Complete, Policy, VisibleDevices
from nri_gpu.policy.select import Terms
from nri_gpu.request.image_requirements import GpuFacts, RequirementFacts, unmet

REQUIREMENT_MAX: Final = 650  # characters of a sentence, so that a refusal shows it whole


class Plan(Struct, frozen=True):
    """The edits of a container, and what they rest on."""

    edits: Edits
    generation: str  # of the staged files that the edits need, as in `Grant`
    compat: str  # the newer CUDA than the driver's among the edits, or why there is none, as in `Inject`
    note: str  # what the program may miss; mostly empty


def plan_for(
    container: Container,
    gpus: tuple[Unit, ...],
    capabilities: Capabilities,
    node: Node,
    policy: Policy,
    *,
    extra: Edits = NO_EDITS,
    completes: bool = False,
    mps: Seat | None = None,
) -> Plan | Reason:
    """Return the plan for these GPUs, or why it cannot be carried out.

    extra: the edits of its extras. completes: another component assigned the GPUs, so the plan adds no GPU node. mps:
    its share of an MPS daemon.
    """
    facts = _facts(gpus, node)
    tree = node.driver.trees.get(capabilities) if node.driver else None
    choice = _compat(container, facts, capabilities, node, policy)
    if choice.package:
        facts = with_compat(facts, choice.package)
    elif reason := lacking_library(capabilities, node):
        return reason
    if reason := _unmet_requirement(container, facts, choice, policy):
        return reason
    edits = plan(
        Injection(
            container=container,
            gpus=gpus,
            capabilities=capabilities,
            inventory=node.inventory,
            tree=tree,
            loader=policy.driver.loader,
            hwcaps=node.hwcaps,
            void=policy.environment.visible_devices is VisibleDevices.VOID or container.pod.on_nvidia_runtime,
            numa=policy.placement.numa,
            extra=extra,
            compat=choice.package,
            compat_folder=choice.folder,
            completes=completes,
            mps=mps,
        )
    )
    if reason := covered_node(edits.devices, container.mounts):
        return reason
    staged = f"{node.generation}+{choice.package.generation}" if choice.package else node.generation
    note = "; ".join(filter(None, (choice.note, _graphics_note(capabilities, tree))))
    return Plan(edits, staged, choice.why, note)


# Interfaces of graphics, each with the place of the file by which its loader finds the driver.
_LOADED_BY_FILE: Final = {"Vulkan": "/vulkan/icd.d/nvidia_icd.", "EGL": "/glvnd/egl_vendor.d/"}


def _graphics_note(capabilities: Capabilities, tree: DriverTree | None) -> str:
    """Return what graphics lacks on this node, or empty. A simulated node's driver has no files."""
    if Capability.GRAPHICS not in capabilities or tree is None or not tree.libraries:
        return ""
    places = [place for place, _ in tree.files]
    lacking = [name for name, file in _LOADED_BY_FILE.items() if not any(file in place for place in places)]
    what = f"this node's driver has no usable file for {'its loader' if len(lacking) == 1 else 'their loaders'}"
    return f"graphics is without {' and '.join(lacking)}: {what}, see `nri-gpu driver`" if lacking else ""


def unreached_note(container: Container, edits: Edits) -> str:
    """Name the variables of the edits that the program will not see, or return empty."""
    names = sorted(container.env_twice & edits.env.keys())
    return f"image and pod both set {', '.join(names)}: the pod's value stays, ours has no effect" if names else ""


def _facts(gpus: tuple[Unit, ...], node: Node) -> RequirementFacts:
    each = tuple(GpuFacts(gpu.arch or (0, 0), gpu.brand) for gpu in gpus_of(gpus))
    return RequirementFacts(node.inventory.driver_version, node.inventory.cuda_version, each)


def _compat(
    container: Container, facts: RequirementFacts, capabilities: Capabilities, node: Node, policy: Policy
) -> CompatChoice:
    """Return the newer CUDA that the container gets from a package; mostly there is none."""
    if Capability.COMPUTE not in capabilities:
        return DRIVERS_OWN
    choice = choose(container.env, facts, node.compat, policy)
    if not policy.compat.dir and not choice.folder:
        return CompatChoice(note=choice.note)
    newer = choice.package or choice.folder
    hindrance = compat_hindrance(container, of_image=bool(choice.folder)) if newer else ""
    return CompatChoice(why=hindrance, note=hindrance) if hindrance else choice


def _unmet_requirement(
    container: Container, facts: RequirementFacts, choice: CompatChoice, policy: Policy
) -> Reason | None:
    """Return the first requirement of the image that the node, or one of the GPUs, does not meet, or None."""
    settings = policy.requirements
    if not settings.check:
        return None
    failed = unmet(container.env, facts, may_disable=settings.may_disable, chars=container.requirement_chars)
    if failed is None:
        return None
    more = f"{failed.clause}; no compatibility package helps: {choice.why}" if choice.why else failed.clause
    return Reason(Code.REQUIREMENT_NOT_MET, more if len(more) < REQUIREMENT_MAX else failed.clause)


# Containers that hold GPU nodes from another component, such as a device plugin, CDI or another NRI plugin. Two
# injectors never serve one container. Where policy says so (`foreign.complete`), such a container gets what it lacks
# to use its GPUs: driver libraries, shared nodes and environment, and never another GPU.


def held_elsewhere(container: Container, node: Node) -> Reason | None:
    """Return why a container that carries another component's GPU nodes is refused, or None.

    It is refused even with `none`, since those nodes would go unseen.
    """
    if not (container.devices or container.opened or container.cdi_devices):
        return None
    # A node of an unknown GPU counts too: the inventory may be new, or have lost a GPU that a device plugin assigned.
    held = "" if container.privileged else nvidia_nodes(container, node) or unknown_nodes(container, node)
    if not (held := held or nvidia_names(container)):
        return None
    return Reason(
        Code.HELD_BY_OTHERS,
        f"the container already holds {held}, put there by a device plugin, CDI or another NRI plugin",
        "two injectors never serve one container",
        "drop its resource request or its gpu.nri.io annotation",
    )


class NotCompleted(Struct, frozen=True):
    """A container that is left as it is. why: for the log, or empty if policy completes no such container."""

    why: str = ""


def complete_unasked(container: Container, node: Node, policy: Policy) -> Inject | Reason | NotCompleted:
    """Complete what a container without a request lacks to use the GPUs that it holds already."""
    if policy.foreign.complete is not Complete.ALL or not completable(container, node):
        return NotCompleted()
    terms = Terms(policy=policy)
    parts = driver_parts(None, container, terms, node)
    capabilities = closure(terms.capabilities if parts.capabilities is None else parts.capabilities)
    if reason := terms.denied_capabilities(capabilities) or node_fault(capabilities, node):
        return reason
    unknown = unknown_nodes(container, node)
    if unknown or not external_units(container, node):
        return NotCompleted(f"not completed: {unknown or 'what it holds'} belongs to no GPU known here")
    return _completed(container, capabilities, node, policy, "foreign.complete", parts.left_out)


def complete_asked(asked: Eligible, container: Container, node: Node) -> Inject | Reason | None:
    """Complete a container with a request, which may only shape the GPUs that the container holds.

    None if the container holds no other component's GPUs.
    """
    reason = held_elsewhere(container, node)
    policy = asked.terms.policy
    if reason is None or policy.foreign.complete is Complete.NONE or not completable(container, node):
        return reason
    if reason := node_fault(asked.capabilities, node):
        return reason
    unknown, held = unknown_nodes(container, node), external_units(container, node)
    if unknown or not held:
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {unknown or 'a GPU in MIG mode'}, assigned by another component and "
            "belonging to no GPU or MIG device known on this node, so it cannot be completed",
            cure="see `nri-gpu gpus` there, or drop its gpu.nri.io annotation",
        )
    if more := beyond(asked.claim, container, held, node.inventory):
        return Reason(
            Code.HELD_BY_OTHERS,
            f"the container already holds {nvidia_nodes(container, node)}, put there by a device plugin or another NRI "
            f"plugin, and {asked.claim.key} asks for {more}",
            cure="a request can only shape GPUs that another component assigned, so ask for no more than those",
        )
    return _completed(container, asked.capabilities, node, policy, asked.rule, asked.left_out)


def _completed(
    container: Container, capabilities: Capabilities, node: Node, policy: Policy, rule: str, left_out: str
) -> Inject | Reason:
    """Return a grant of no GPU, since none of the container's is ours to grant, with the edits that complete it."""
    held = external_units(container, node)
    if out_of_use := first_out_of_use(held, container):
        return cannot(called(out_of_use), why_not(out_of_use))
    plan = plan_for(container, held, capabilities, node, policy, completes=True)
    if isinstance(plan, Reason):
        return plan
    grant = Grant.to(container, (), None, plan.generation)
    note = "; ".join(filter(None, (unreached_note(container, plan.edits), plan.note)))
    completes = tuple(unit.uuid for unit in held)
    return Inject(plan.edits, grant, rule, note=note, compat=plan.compat, completes=completes, left_out=left_out)
