"""What `check` says of NVIDIA's own tools on the node, under the policy that it checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu.host.leftovers import Kind, Leftover, leftovers
from nri_gpu.host.others import Other, Who, others
from nri_gpu.policy.model import Disarm, Policy, VisibleDevices

SHOWN_MAX: Final = 3  # paths in a sentence


def node_advice(policy: Policy, root: Path = Path("/")) -> tuple[str, ...]:
    """One sentence a thing to be done."""
    kubelet = str(Path(policy.kubelet.registry_dir).parent)
    return (*_sentences(policy, leftovers(root)), *_of_others(policy, others(root, policy.kubelet.dir, kubelet)))


def _sentences(policy: Policy, found: tuple[Leftover, ...]) -> Iterator[str]:
    runtimes, specifications = (tuple(each.path for each in found if each.kind is kind) for kind in Kind)
    environment = policy.environment
    if runtimes and environment.visible_devices is not VisibleDevices.VOID:
        yield (
            f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)}) and would serve containers that "
            'nri-gpu has served already: set environment.visible_devices = "void", or uninstall it'
        )
    if runtimes and environment.disarm is not Disarm.ALL:
        yield (
            f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)}), which gives GPUs to any image "
            'that sets NVIDIA_VISIBLE_DEVICES, past this policy: set environment.disarm = "all" unless NVIDIA\'s '
            "device plugin is used, or uninstall it"
        )
    if specifications:
        yield (
            f"CDI specifications with hooks lie on this node ({_paths(specifications)}): whoever names their devices "
            "runs those hooks; `nri-gpu cdi generate` writes one without"
        )


def _of_others(policy: Policy, found: tuple[Other, ...]) -> Iterator[str]:
    signs = {who: tuple(each for each in found if each.who is who) for who in Who}
    yield from _of_device_plugin(policy, signs[Who.DEVICE_PLUGIN], by_cdi=bool(signs[Who.DEVICE_PLUGIN_CDI]))
    if (driver := signs[Who.OPERATOR_DRIVER]) and policy.driver.root == "/":
        yield (
            f"the GPU Operator's driver container has its tree at {driver[0].path}: where the host has no driver of "
            "its own, set driver.root to that"
        )
    if operator := signs[Who.OPERATOR]:
        yield (
            f"the GPU Operator looks after this node ({_places(operator)}): its toolkit makes NVIDIA's runtime a "
            "runtime class, and its device plugin gives out every GPU; docs/kubernetes.md says what to switch "
            "off in it"
        )
    if dra := signs[Who.DRA]:
        yield (
            f"NVIDIA's DRA driver serves claims on this node ({_places(dra)}): whom it gives GPUs gets them by CDI and "
            "counts as served by others here, but what it has allocated is known only with the container, so keep "
            "annotations off its GPUs by a [[pool]]"
        )


def _of_device_plugin(policy: Policy, found: tuple[Other, ...], *, by_cdi: bool) -> Iterator[str]:
    """Whose containers NVIDIA's runtime, the container runtime by CDI, or we inject."""
    if not found:
        return
    kubelet, names = policy.kubelet, tuple(dict.fromkeys(each.name for each in found))
    sockets = _places(found)
    same = kubelet.resource + ".shared" * (kubelet.rename and kubelet.replicas > 1)
    left = tuple(name for name in names if kubelet.inject_for.first(name) is None)
    if kubelet.enabled and same in names:
        yield (
            f"NVIDIA's device plugin serves {same} ({sockets}), as nri-gpu is to: set kubelet.resource to another name "
            "for as long as both are here, or take that one off the node"
        )
    elif left and by_cdi:
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}) by CDI: its containers count as served by "
            "others, and what it has allocated is known only with the container"
        )
    elif left:
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}), by a variable that NVIDIA's runtime or hook "
            f"obeys: to have nri-gpu inject those GPUs instead set kubelet.inject_for = [{_listed(left)}]"
        )
    if left and not by_cdi and policy.environment.disarm is Disarm.ALL:
        yield (
            "environment.disarm takes from NVIDIA's device plugin the variable that it gives GPUs by: list its "
            "resources in kubelet.inject_for, or set it to none"
        )


def _places(found: tuple[Other, ...]) -> str:
    return _paths(tuple(each.path for each in found))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _paths(paths: tuple[str, ...]) -> str:
    more = len(paths) - SHOWN_MAX
    return ", ".join(paths[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
