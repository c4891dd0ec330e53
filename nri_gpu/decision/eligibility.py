"""Whether a request is eligible for GPUs: what policy says of it, and whether the node can grant any GPU at all."""

from __future__ import annotations

from msgspec import Struct

from nri_gpu.allocation.messages import by_the_kernel
from nri_gpu.decision.mps import single_gpu_fault
from nri_gpu.domain.claim import Claim, Everything, Mode
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import Extras
from nri_gpu.domain.gpu import Capabilities, Capability, closure
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import DriverFiles, Node
from nri_gpu.injection.devices import missing_modules, two_versions
from nri_gpu.injection.mps import client_hindrance
from nri_gpu.policy.model import Policy, PrivilegedAction
from nri_gpu.policy.select import Allowed, Terms
from nri_gpu.request.environment import VARIABLE


class Eligible(Struct, frozen=True):
    """A request that policy allows, with policy's defaults filled in.

    capabilities: closed. rule: what allowed the request. seat: its share of an MPS daemon; None in other modes.
    """

    claim: Claim
    terms: Terms
    mode: Mode
    capabilities: Capabilities
    extras: Extras
    rule: str
    seat: Seat | None = None


def check_request(
    claim: Claim, container: Container, policy: Policy, allowed: Allowed, node: Node
) -> Eligible | Reason:
    """The request with its defaults, or why policy refuses it. Says nothing of the node's GPUs."""
    if sentence := _denied_source(claim, container, policy):
        return Reason(Code.NOT_ALLOWED, sentence)
    terms = allowed.terms
    mode = claim.mode or terms.mode
    capabilities = closure(terms.capabilities if claim.capabilities is None else claim.capabilities)
    extras = claim.extras if claim.extras.asked else terms.extras
    denied = terms.denied_mode(mode) or terms.denied_capabilities(capabilities) or terms.denied_extras(extras.asked)
    if denied:
        return Reason(Code.NOT_ALLOWED, denied)
    seat = _mps_seat(claim, container, node, terms) if mode is Mode.MPS else None
    if isinstance(seat, Reason):
        return seat
    return Eligible(claim, terms, mode, capabilities, extras, allowed.rule, seat)


def _denied_source(claim: Claim, container: Container, policy: Policy) -> str:
    """Why policy refuses a request for where it was written, or for the container that makes it; empty if not."""
    if claim.key == VARIABLE and isinstance(claim.wanted, Everything) and not policy.environment.may_ask_all:
        return (
            f"{VARIABLE}=all asks for every GPU, and every CUDA image sets it: name GPUs in it, set it to void, use a "
            "gpu.nri.io annotation, or set environment.may_ask_all in the policy."
        )
    if container.privileged and policy.privileged.action is PrivilegedAction.DENY:
        return (
            "a privileged container can use every GPU of this node whatever it is granted, so privileged.action in the "
            "policy denies its request: make it unprivileged, or change that setting."
        )
    return ""


def _mps_seat(claim: Claim, container: Container, node: Node, terms: Terms) -> Seat | Reason:
    """The container's share of an MPS daemon, or why it cannot have one."""
    mps = terms.policy.mps
    if sentence := mps.denied(claim.sharing, terms.source):
        return Reason(Code.NOT_ALLOWED, sentence)
    if node.mps.fault:
        return Reason(Code.NODE_NOT_READY, node.mps.fault)
    return single_gpu_fault(claim) or client_hindrance(container) or mps.seat(claim.sharing, container.uid)


def node_fault(capabilities: Capabilities, node: Node) -> Reason | None:
    """Why this node can grant no GPU with these capabilities, whichever GPUs are free; None if it can."""
    if node.inventory.fault:
        fault, gpus = node.inventory.fault, by_the_kernel(node.inventory)
        return _cannot_grant(f"{fault.rstrip('.')}{gpus}" if gpus else fault)
    if not node.inventory.gpus:
        return None  # `place` explains it better
    if reason := missing_modules(capabilities, node.inventory):
        return reason
    if node.driver is None:
        return _cannot_grant(node.driver_fault or "the driver's files are not found yet; try again")
    if fault := _version_fault(node.driver.version, node):
        return _cannot_grant(fault)
    if not node.inventory.simulated and capabilities not in node.driver.trees:
        return Reason(Code.NODE_NOT_READY, _not_staged(capabilities, node.driver))
    return None


def _cannot_grant(fault: str) -> Reason:
    return Reason(Code.NODE_NOT_READY, as_sentence(f"this node cannot grant GPUs: {fault}"))


def _not_staged(capabilities: Capabilities, driver: DriverFiles) -> str:
    known = frozenset[Capability]().union(*driver.trees)
    if lacking := [each for each in Capability if each in capabilities - known]:
        return (
            f"the driver on this node has no files for {', '.join(lacking)}: install that part of it, ask without, or "
            "run the pod on a node that has it."
        )
    if capabilities == {Capability.COMPAT32}:
        return "compat32 means the 32-bit libraries of other capabilities: name them too."
    wanted = ", ".join(sorted(capabilities))
    return f"the driver's files for {wanted} are not staged on this node; try again."


def _version_fault(files: str, node: Node) -> str:
    """Why libraries of this version do not work with the loaded kernel module; empty if they do."""
    if node.inventory.simulated:
        return ""
    if node.module_version == "":
        return (
            f"the nvidia kernel module was unloaded, and the driver's libraries are {files}: a driver is being "
            "replaced or was removed; once `modprobe nvidia` has loaded it, try again."
        )
    for kernel in filter(None, (node.module_version, node.inventory.driver_version)):
        if kernel != files:
            return f"{two_versions(files, kernel)}; containers created in between would not start properly."
    return ""


def as_sentence(text: str) -> str:
    """The text with one full stop at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
