"""What `check` says of NVIDIA's own tools on the node, under the policy that it checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu.host.leftovers import Kind, Leftover, leftovers
from nri_gpu.policy.model import Disarm, Policy, VisibleDevices

SHOWN_MAX: Final = 3  # paths in a sentence


def node_advice(policy: Policy, root: Path = Path("/")) -> tuple[str, ...]:
    """One sentence a thing to be done."""
    return tuple(_sentences(policy, leftovers(root)))


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


def _paths(paths: tuple[str, ...]) -> str:
    more = len(paths) - SHOWN_MAX
    return ", ".join(paths[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
