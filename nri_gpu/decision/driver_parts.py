"""The parts of the driver that a container's NVIDIA_DRIVER_CAPABILITIES asks for, where policy has it ask.

It only fills in what neither the request nor a rule says, and is never a reason to refuse: what the container may not
have, or what this node cannot serve, is left out, and the log says so.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.decision.eligible import lacking_library, node_fault
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.gpu_request import Claim
from nri_gpu.domain.node import Node
from nri_gpu.domain.text import clipped, quoted
from nri_gpu.injection.device_nodes import covered_node, drm_nodes, shared_nodes
from nri_gpu.policy.model import DriverCapabilities
from nri_gpu.policy.select import Terms
from nri_gpu.request.environment import CAPABILITIES, named_capabilities

LEFT_OUT_MAX: Final = 600  # characters
_NOTHING_RUNS: Final = frozenset({Capability.UTILITY, Capability.COMPAT32})  # by these alone


class DriverParts(Struct, frozen=True):
    """The parts of the driver that a container asks for."""

    capabilities: Capabilities | None  # None leaves them to the policy, as in `Claim`
    left_out: str = ""  # what the variable names beyond what the container gets, and why; or empty


def driver_parts(claim: Claim | None, container: Container, terms: Terms, node: Node) -> DriverParts:
    """Return the parts that the request says, else those of the variable, else None. claim: None without a request."""
    said, rule = claim.capabilities if claim else None, terms.rule
    value = container.env.get(CAPABILITIES, "")
    if not (named := named_capabilities(value)):
        return DriverParts(said)
    if claim and said is not None:
        why = f"{claim.key} only monitors" if claim.admin else f"{claim.key} says capabilities="
    elif rule and rule.default_capabilities:
        why = f"{terms.path}.default_capabilities in {terms.source} says what comes"
    elif terms.policy.environment.driver_capabilities is DriverCapabilities.IGNORE:
        why = f'environment.driver_capabilities is "ignore" in {terms.source}'
    else:
        said, why = _served(named, container, terms, node)
    beyond = named - closure(terms.capabilities if said is None else said)
    words = ", ".join(each for each in Capability if each in beyond)
    return DriverParts(
        said, clipped(f"{CAPABILITIES}={quoted(value)} also names {words}: {why}", LEFT_OUT_MAX) if words else ""
    )


def _served(named: Capabilities, container: Container, terms: Terms, node: Node) -> tuple[Capabilities | None, str]:
    """Return what is left of the parts that are named, closed, and why the rest is not.

    None, for the default, if that is nothing by which a program runs on a GPU although such parts are named: without
    libcuda, `compute,utility` is refused as it is without the variable.
    """
    left, faults = frozenset[Capability](), dict[str, None]()
    for each in (one for one in Capability if one in named):
        tried = left | closure(frozenset({each}))
        if fault := _fault(tried, container, terms, node):
            faults[f"{fault.what}: {fault.why}" if fault.why else fault.what] = None
        else:
            left = tried
    return (left if left == named or left - _NOTHING_RUNS else None), "; ".join(faults)


def _fault(parts: Capabilities, container: Container, terms: Terms, node: Node) -> Reason | None:
    """Return why a container with these parts of the driver would be refused, whichever GPUs it gets, or None."""
    inventory, added = node.inventory, parts - closure(terms.capabilities)
    nodes = [*shared_nodes(parts, inventory.majors)]
    if Capability.GRAPHICS in parts:
        nodes += [each for gpu in inventory.gpus for each in drm_nodes(gpu)]
    return (
        terms.denied_capabilities(parts)
        or node_fault(parts, node)
        or lacking_library(added, node)  # a compatibility package may have libcuda, but is no promise
        or covered_node((each.path for each in nodes), container.mounts)
    )
