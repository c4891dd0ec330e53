"""Whether this node can grant GPUs at all, whatever GPUs are free. Pure."""

from __future__ import annotations

from nri_gpu.allocation.messages import by_the_kernel
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.domain.node import DriverFiles, Node
from nri_gpu.injection.devices import missing_modules, two_versions


def hindrance(capabilities: Capabilities, node: Node) -> Reason | None:
    """What makes any grant on this node impossible, whatever GPUs are free."""
    if node.inventory.fault:
        fault, gpus = node.inventory.fault, by_the_kernel(node.inventory)
        sentence = f"{fault.rstrip('.')}{gpus}" if gpus else fault
        return Reason(Code.NODE_NOT_READY, ended(f"this node cannot grant GPUs: {sentence}"))
    if not node.inventory.gpus:
        return None  # place() says it better
    if reason := missing_modules(capabilities, node.inventory):
        return reason
    if node.driver is None:
        fault = node.driver_fault or "the driver's files are not found yet; try again"
        return Reason(Code.NODE_NOT_READY, ended(f"this node cannot grant GPUs: {fault}"))
    if fault := _generation_fault(node.driver.version, node):
        return Reason(Code.NODE_NOT_READY, f"this node cannot grant GPUs: {fault}")
    if not node.inventory.simulated and capabilities not in node.driver.trees:
        return Reason(Code.NODE_NOT_READY, _not_staged(capabilities, node.driver))
    return None


def _not_staged(capabilities: Capabilities, driver: DriverFiles) -> str:
    known = frozenset[Capability]().union(*driver.trees)
    if lacking := [each for each in Capability if each in capabilities - known]:
        return (
            f"the driver on this node has no files for {', '.join(lacking)}: install that part of it, ask without, or "
            "run the pod where it is."
        )
    if capabilities == {Capability.COMPAT32}:
        return "compat32 means the 32-bit libraries of other capabilities: name them too."
    wanted = ", ".join(sorted(capabilities))
    return f"the driver's files for {wanted} are not staged on this node; try again."


def _generation_fault(files: str, node: Node) -> str:
    """Why libraries of this version would not work with the kernel module that is loaded; empty when they would."""
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


def ended(sentence: str) -> str:
    """With its full stop, once."""
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
