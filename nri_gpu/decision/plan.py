"""What a container is given for GPUs that are settled: its image's wishes first, then all that is added to it. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import NO_EXTRA_EDITS, Edits, ExtraEdits
from nri_gpu.domain.gpu import Capabilities, Capability, Unit, whole
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Node
from nri_gpu.injection.devices import covered_node
from nri_gpu.injection.mounts import compat_hindrance
from nri_gpu.injection.plan import Share, plan
from nri_gpu.policy.model import Policy, VisibleDevices
from nri_gpu.requirements.check import Unmet, stated_in, unmet
from nri_gpu.requirements.compat import DRIVERS_OWN, CompatChoice, CompatTerms, choose, with_compat
from nri_gpu.requirements.grammar import GpuFacts, RequirementFacts

REQUIREMENT_MAX: Final = 650  # characters of a sentence, so that it stays whole
REQUIREMENT_KEPT: Final = 4096  # characters; CUDA images have up to 2.2 kB of them

Stated = tuple[tuple[str, str], ...]  # variables by which an image says what it requires


class Plan(Struct, frozen=True):
    """The edits, what of the staged files they need, and which newer CUDA than the driver's is among them, or why none.

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
    extra: ExtraEdits = NO_EXTRA_EDITS,
    completes: bool = False,
    mps: Seat | None = None,
) -> Plan | Reason:
    """For these GPUs, or what is in the way.

    extra: what its extras are made of. completes: others gave the GPUs, so no node of one is added. mps: its place at
    a daemon.
    """
    stated, chars = stated_in(container.env), container.requirement_chars
    choice = _compat(container, gpus, capabilities, node, policy) if stated else DRIVERS_OWN
    facts = with_compat(_facts(gpus, node), choice.package)
    if (stated or chars) and (reason := _requirement(stated, chars, facts, choice, policy)):
        return reason
    share = Share(
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
    edits = plan(share)
    if reason := covered_node(edits.devices, container.mounts):
        return reason
    staged = f"{node.generation}+{choice.package.generation}" if choice.package else node.generation
    return Plan(edits, staged, choice.why)


def _facts(gpus: tuple[Unit, ...], node: Node) -> RequirementFacts:
    each = tuple(GpuFacts(gpu.arch, gpu.brand) for gpu in map(whole, gpus))
    return RequirementFacts(node.inventory.driver_version, node.inventory.cuda_version, each)


def _compat(
    container: Container, gpus: tuple[Unit, ...], capabilities: Capabilities, node: Node, policy: Policy
) -> CompatChoice:
    """The newer CUDA that it gets from a package on the host; mostly none, and nothing is looked at."""
    settings = policy.compat
    if not settings.dir or Capability.COMPUTE not in capabilities:
        return DRIVERS_OWN
    terms = CompatTerms(
        brands=frozenset(settings.brands),
        across_minor=settings.across_minor,
        check=policy.requirements.check,
        may_disable=policy.requirements.may_disable,
    )
    choice = choose(container.env, _facts(gpus, node), node.compat, terms)
    hindrance = compat_hindrance(container) if choice.package else ""
    return CompatChoice(why=hindrance) if hindrance else choice


def _requirement(
    stated: Stated, chars: int, facts: RequirementFacts, choice: CompatChoice, policy: Policy
) -> Reason | None:
    """What the image requires, and the node or one of the GPUs chosen for it is not."""
    if not policy.requirements.check:
        return None
    short = max(chars, sum(len(value) for _, value in stated)) <= REQUIREMENT_KEPT
    failed = (_kept_judgement if short else _judgement)(stated, facts, policy.requirements.may_disable, chars)
    if failed is None:
        return None
    more = f"{failed.sentence[:-1]}; no compatibility package helps: {choice.why}." if choice.why else ""
    return Reason(Code.REQUIREMENT_NOT_MET, more if more and len(more) <= REQUIREMENT_MAX else failed.sentence)


def _judgement(stated: Stated, facts: RequirementFacts, may_disable: bool, chars: int) -> Unmet | None:
    return unmet(dict(stated), facts, may_disable=may_disable, chars=chars)


# Images are few, and what one requires costs more to check than all the rest of a decision.
_kept_judgement = lru_cache(maxsize=64)(_judgement)
