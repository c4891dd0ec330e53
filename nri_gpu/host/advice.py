"""Advice of `check` on other components on this host that inject or allocate NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from nri_gpu.host.components import Component, ComponentKind, allocators, injectors
from nri_gpu.policy.model import Disarm, Policy, VisibleDevices

SHOWN_MAX: Final = 3  # paths in a sentence


def node_advice(policy: Policy, root: Path = Path("/")) -> tuple[str, ...]:
    """A sentence for each thing to do."""
    kubelet = str(Path(policy.kubelet.registry_dir).parent)
    found = (*injectors(root), *allocators(root, policy.kubelet.dir, kubelet))
    of_kind = {kind: tuple(each for each in found if each.kind is kind) for kind in ComponentKind}
    return (
        *_on_runtimes(policy, of_kind[ComponentKind.RUNTIME]),
        *_on_specifications(of_kind[ComponentKind.SPECIFICATION]),
        *_on_device_plugin(
            policy,
            of_kind[ComponentKind.DEVICE_PLUGIN],
            by_cdi=bool(of_kind[ComponentKind.DEVICE_PLUGIN_CDI]),
        ),
        *_on_operator(policy, of_kind[ComponentKind.OPERATOR], of_kind[ComponentKind.OPERATOR_DRIVER]),
        *_on_dra(of_kind[ComponentKind.DRA]),
    )


def _on_runtimes(policy: Policy, runtimes: Sequence[Component]) -> Iterator[str]:
    if not runtimes:
        return
    environment = policy.environment
    installed = f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)})"
    if environment.visible_devices is not VisibleDevices.VOID:
        yield (
            f"{installed} and would inject into containers that nri-gpu has injected into already: set "
            'environment.visible_devices = "void", or uninstall it'
        )
    if environment.disarm is not Disarm.ALL:
        yield (
            f"{installed}, which gives GPUs to any image that sets NVIDIA_VISIBLE_DEVICES, past this policy: set "
            'environment.disarm = "all" unless NVIDIA\'s device plugin is used, or uninstall it'
        )


def _on_specifications(specifications: Sequence[Component]) -> Iterator[str]:
    if specifications:
        yield (
            f"this node has CDI specifications with hooks ({_paths(specifications)}), which run for containers that "
            "name their devices; `nri-gpu cdi generate` writes one without"
        )


def _on_device_plugin(policy: Policy, found: Sequence[Component], *, by_cdi: bool) -> Iterator[str]:
    """Who injects what NVIDIA's device plugin allocates: NVIDIA's runtime, the container runtime by CDI, or we."""
    if not found:
        return
    kubelet, names = policy.kubelet, tuple(dict.fromkeys(each.resource for each in found))
    sockets = _paths(found)
    ours = kubelet.resource + ".shared" * (kubelet.rename and kubelet.replicas > 1)
    left = tuple(name for name in names if kubelet.inject_for.first(name) is None)
    if kubelet.enabled and ours in names:
        yield (
            f"NVIDIA's device plugin serves {ours} ({sockets}), which nri-gpu is to serve: set kubelet.resource to "
            "another name for as long as both are here, or remove that device plugin from the node"
        )
    elif left and by_cdi:
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}) by CDI: nri-gpu does not inject into its "
            "containers, and learns what it allocated only when they are created"
        )
    elif left:
        listed = ", ".join(f'"{name}"' for name in left)
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}), by a variable that NVIDIA's runtime or hook "
            f"obeys: to have nri-gpu inject those GPUs instead set kubelet.inject_for = [{listed}]"
        )
    if left and not by_cdi and policy.environment.disarm is Disarm.ALL:
        yield (
            "environment.disarm removes the variable by which NVIDIA's device plugin gives GPUs: list its resources in "
            "kubelet.inject_for, or set environment.disarm to none"
        )


def _on_operator(policy: Policy, operator: Sequence[Component], driver: Sequence[Component]) -> Iterator[str]:
    if driver and policy.driver.root == "/":
        yield (
            f"the GPU Operator's driver container has its tree at {driver[0].path}: if the host has no driver of its "
            "own, set driver.root to that"
        )
    if operator:
        yield (
            f"the GPU Operator manages this node ({_paths(operator)}): its toolkit makes NVIDIA's runtime a runtime "
            "class, and its device plugin allocates every GPU; docs/kubernetes.md says what to switch off in it"
        )


def _on_dra(dra: Sequence[Component]) -> Iterator[str]:
    if dra:
        yield (
            f"NVIDIA's DRA driver serves claims on this node ({_paths(dra)}): its containers get GPUs by CDI, and "
            "nri-gpu learns what it allocated only when they are created, so keep annotations off its GPUs by a "
            "[[pool]]"
        )


def _paths(found: Sequence[Component]) -> str:
    more = len(found) - SHOWN_MAX
    return ", ".join(each.path for each in found[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
