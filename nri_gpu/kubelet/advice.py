"""What `check` hears of the kubelet: which GPUs it can give out, and who is to inject them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy

# Ids of NVIDIA's device plugin and of ours, of GPUs, MIG devices and replicas of them; other vendors' look otherwise.
_OF_GPUS: Final = ("GPU-", "MIG-")


def kubelet_advice(policy: Policy) -> tuple[str, ...]:
    """One sentence a thing to be done; none where no kubelet answers, or gRPC is not installed."""
    socket = Path(policy.kubelet.podresources or "/nowhere")
    try:
        if not socket.is_socket():
            return ()
    except OSError:
        return ()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from nri_gpu.kubelet.podresources import PodResources, PodResourcesError
    except ImportError:
        return ()

    async def ask() -> Mapping[str, tuple[str, ...]]:
        client = PodResources(socket)
        try:
            return await client.allocatable()
        finally:
            await client.close()

    try:
        return tuple(_sentences(policy.kubelet, asyncio.run(ask())))
    except PodResourcesError as error:
        return (f"the kubelet does not tell what it can give: {error}",)


def _sentences(settings: KubeletSettings, allocatable: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    own = settings.resource.partition("/")[0] + "/mig-"
    for resource, ids in sorted(allocatable.items()):
        ours = settings.enabled and (resource.removesuffix(".shared") == settings.resource or resource.startswith(own))
        if not ids or not all(id_.startswith(_OF_GPUS) for id_ in ids):
            continue
        if not ours and settings.inject_for.first(resource) is None:
            yield (
                f"the kubelet gives out {len(ids)} of {resource}, by a device plugin that is not nri-gpu: whoever has "
                "one is served by others, unless kubelet.inject_for lists it"
            )
    for index, pattern in enumerate(settings.inject_for.patterns):
        if not any(settings.inject_for.first(resource) == index for resource in allocatable):
            yield f'kubelet.inject_for[{index}] = "{pattern}" is of no resource that the kubelet has to give just now'
