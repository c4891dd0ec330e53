"""Advice of `check` on the kubelet: the GPU resources that it allocates and nri-gpu does not inject."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.finding import Finding, in_policy, warning
from nri_gpu.kubelet.kubelet_controller import set_up_grpc
from nri_gpu.policy.kubelet_settings import SHARED, KubeletSettings
from nri_gpu.policy.model import Policy

# Of device IDs of NVIDIA's device plugin and ours: GPUs, MIG devices and replicas. Other vendors' differ.
RESOURCES: Final = "kubelet resources"
_PREFIXES: Final = ("GPU-", "MIG-")


def kubelet_advice(policy: Policy, timeout_s: float = 2.0) -> tuple[Finding, ...]:
    """Return what to do; empty where there is no kubelet."""
    socket = Path(policy.kubelet.podresources or "/nowhere")
    try:
        if not socket.is_socket():
            return ()
    except OSError:
        return ()
    set_up_grpc()
    from nri_gpu.kubelet.podresources import PodResources, PodResourcesError

    async def ask() -> Mapping[str, tuple[str, ...]]:
        client = PodResources(socket, timeout_s)
        try:
            return await client.allocatable()
        finally:
            await client.close()

    try:
        return tuple(_findings(policy.kubelet, asyncio.run(ask())))
    except PodResourcesError as error:
        return (warning(RESOURCES, f"the kubelet does not list what it can allocate: {error}"),)


def _findings(settings: KubeletSettings, allocatable: Mapping[str, tuple[str, ...]]) -> Iterator[Finding]:
    for resource, ids in sorted(allocatable.items()):
        ours = settings.enabled and settings.is_own(resource.removesuffix(SHARED))
        if not ids or not all(id_.startswith(_PREFIXES) for id_ in ids):
            continue
        if not ours and not settings.inject_for.match(resource):
            yield in_policy(
                f"the kubelet allocates {len(ids)} of {resource} from another device plugin: nri-gpu does not inject "
                "them unless kubelet.inject_for lists that resource",
                "kubelet.inject_for",
                subject=RESOURCES,
            )
    for index, pattern in enumerate(settings.inject_for.patterns):
        if not any(settings.inject_for.first(resource) == index for resource in allocatable):
            yield in_policy(
                f'kubelet.inject_for[{index}] = "{pattern}" matches no resource that the kubelet can allocate now',
                "kubelet.inject_for",
                subject=RESOURCES,
            )
