"""What a container is given for GPUs that are settled: its image's requirements are checked, then its edits planned."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.gpu import Capabilities, Capability, Unit, whole
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Node
from nri_gpu.injection.devices import covered_node
from nri_gpu.injection.mounts import compat_hindrance
from nri_gpu.injection.plan import Injection, plan
from nri_gpu.policy.model import Policy, VisibleDevices
from nri_gpu.requirements.check import GpuFacts, RequirementFacts, unmet
from nri_gpu.requirements.compat import DRIVERS_OWN, CompatChoice, CompatTerms, choose, with_compat

REQUIREMENT_MAX: Final = 650  # characters of a sentence, so that a refusal shows it whole


class Plan(Struct, frozen=True):
    """The edits, the staged files that they need, and which newer CUDA than the driver's is among them, or why none.

    generation, compat: as in `Grant` and `Inject`.
    """

    edits: Edits
    generation: str
    compat: str


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
    """The plan for these GPUs, or why it cannot be carried out.

    extra: the edits of its extras. completes: another component assigned the GPUs, so no node of one is added. mps: its
    share of an MPS daemon.
    """
    facts = _facts(gpus, node)
    choice = _compat(container, facts, capabilities, node, policy)
    if reason := _unmet_requirement(container, with_compat(facts, choice.package), choice, policy):
        return reason
    edits = plan(
        Injection(
            container=container,
            gpus=gpus,
            capabilities=capabilities,
            inventory=node.inventory,
            tree=node.driver.trees.get(capabilities) if node.driver else None,
            loader=policy.driver.loader,
            void=policy.environment.visible_devices is VisibleDevices.VOID,
            numa=policy.placement.numa,
            extra=extra,
            compat=choice.package,
            completes=completes,
            mps=mps,
        )
    )
    if reason := covered_node(edits.devices, container.mounts):
        return reason
    staged = f"{node.generation}+{choice.package.generation}" if choice.package else node.generation
    return Plan(edits, staged, choice.why)


def unreached_note(container: Container, edits: Edits) -> str:
    """Which variables of the edits the program will not see; empty if it sees all."""
    names = sorted(container.env_twice & edits.env.keys())
    return f"image and pod both set {', '.join(names)}: the pod's value stays, ours has no effect" if names else ""


def _facts(gpus: tuple[Unit, ...], node: Node) -> RequirementFacts:
    each = tuple(GpuFacts(gpu.arch, gpu.brand) for gpu in map(whole, gpus))
    return RequirementFacts(node.inventory.driver_version, node.inventory.cuda_version, each)


def _compat(
    container: Container, facts: RequirementFacts, capabilities: Capabilities, node: Node, policy: Policy
) -> CompatChoice:
    """The newer CUDA that the container gets from a package on the host; mostly none."""
    settings = policy.compat
    if not settings.dir or Capability.COMPUTE not in capabilities:
        return DRIVERS_OWN
    terms = CompatTerms(
        brands=frozenset(settings.brands),
        across_minor=settings.across_minor,
        check=policy.requirements.check,
        may_disable=policy.requirements.may_disable,
    )
    choice = choose(container.env, facts, node.compat, terms)
    hindrance = compat_hindrance(container) if choice.package else ""
    return CompatChoice(why=hindrance) if hindrance else choice


def _unmet_requirement(
    container: Container, facts: RequirementFacts, choice: CompatChoice, policy: Policy
) -> Reason | None:
    """The first requirement of the image that the node, or one of the GPUs, does not meet."""
    settings = policy.requirements
    if not settings.check:
        return None
    failed = unmet(container.env, facts, may_disable=settings.may_disable, chars=container.requirement_chars)
    if failed is None:
        return None
    more = f"{failed.sentence[:-1]}; no compatibility package helps: {choice.why}." if choice.why else ""
    return Reason(Code.REQUIREMENT_NOT_MET, more if more and len(more) <= REQUIREMENT_MAX else failed.sentence)
