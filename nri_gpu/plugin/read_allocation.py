"""The kubelet's allocation to a container: by our device plugin, by a claim, or by another device plugin.

Nothing is asked and nothing changes here: the handler asks the kubelet before, and hands in what is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.decision.asked import asked_for_pod
from nri_gpu.domain.allocation import (
    REQUIRED_DESTINATION,
    Allocated,
    AllocationInvalid,
    AllocationPending,
    ContainerDevices,
    PodDevices,
)
from nri_gpu.domain.container import Container, Pod
from nri_gpu.domain.gpu_request import Count, Everything
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.dra.read_claims import by_markers
from nri_gpu.kubelet.allocations import by_tokens
from nri_gpu.kubelet.read_listing import Listing, by_listing, is_gpu_resource
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.request.environment import VARIABLE

NOT_LISTED_YET: Final = (
    "it is for each container of this pod, and the kubelet has not said yet whether it allocated GPUs to any of them "
    "(PodResources): it will be tried again; if this lasts, see the log of `nri-gpu run`"
)
NOT_READ_YET: Final = (
    "it is for each container of this pod, and `nri-gpu dra` has not said yet whether the pod has a ResourceClaim that "
    "is shared in its namespace: it will be tried again; if this lasts, see the log of `nri-gpu dra`"
)

NOT_LISTED: Final = (
    "it names GPUs that the kubelet lists for no container of this pod (PodResources leaves out init containers that "
    "end): have a later container or a sidecar ask for as many in resources.limits, or take the variable out of the "
    "pod's environment"
)


class AllocationFacts(Struct, frozen=True):
    """The facts, apart from the container itself, from which its allocation is read."""

    token_key: bytes | None  # None while there is none
    marker_key: bytes
    claims: Mapping[ClaimUid, PreparedClaim]  # on this node
    named: PodDevices | None  # by PodResources, for a pod that may be of a claim's PodGroup; None without an answer
    listing: Listing | None  # what PodResources says of its pod; None where it is not asked
    inventory: Inventory
    settings: KubeletSettings
    in_question: frozenset[ClaimUid] = frozenset()  # of `claims`: read anew, as a pod has come that may share them


def read_allocation(container: Container, facts: AllocationFacts) -> Container:
    """Return the container with what the kubelet allocated to it; the same object where that is nothing.

    What is signed is read before what is only listed, and each reader sees what those before it have read: a container
    that has both tokens and markers is refused, and a token counts only if PodResources does not contradict it.
    """
    container = by_tokens(container, facts.token_key)
    if container.markers:
        container = by_markers(container, facts.marker_key, facts.claims, facts.named)
    return by_pod(by_listing(container, facts.listing, facts.inventory, facts.settings), facts)


def by_pod(container: Container, facts: AllocationFacts) -> Container:
    """Say of a container without GPUs of its own whether others of its pod have some; else return the same object.

    That matters only to an annotation of the whole pod: it then shapes what those have. A container that PodResources
    lists with GPUs, or that has the required device, lacks what shows them, and must not pass as one without.
    """
    allocation = container.kubelet or Allocated()
    if not isinstance(allocation, Allocated) or allocation.devices or REQUIRED_DESTINATION in container.mounts:
        return container
    nobody_allocates = not (facts.listing or facts.claims)
    if nobody_allocates or (claim := asked_for_pod(container)) is None:
        return container
    answers = (facts.listing.pod if facts.listing else None, facts.named)
    listed = [each for told in answers if told for each in told.containers]
    if any(each.name == container.name and (each.claims or _resources(each, facts.settings)) for each in listed):
        return container
    having = [resource for each in listed for resource in _resources(each, facts.settings)]
    # A claim for monitoring gives no GPU that an annotation could shape.
    having += [each.called for each in facts.claims.values() if each.holds and container.pod.uid in each.pods]
    if having and allocation.key == VARIABLE and all(each.name != container.name for each in listed):
        return replace(container, kubelet=AllocationInvalid(NOT_LISTED, VARIABLE))
    if having:
        return replace(container, kubelet=Allocated(key=having[0], elsewhere=True))
    fault = _awaited(container.pod, facts) if isinstance(claim.wanted, Count | Everything) else ""
    return replace(container, kubelet=AllocationPending(fault, claim.key)) if fault else container


def _resources(container: ContainerDevices, settings: KubeletSettings) -> list[str]:
    """Return the resources by which PodResources lists GPUs for a container."""
    return [each.resource for each in container.devices if is_gpu_resource(each, settings)]


def _awaited(pod: Pod, facts: AllocationFacts) -> str:
    """Return which answer on a pod's allocations is still to come, or empty."""
    if listing := facts.listing:
        # The kubelet knows no pod that it did not make.
        made = pod.qos or (listing.pod is None and not listing.absent)
        if made and not (listing.pod and listing.pod.containers):
            return NOT_LISTED_YET
    claims = [each for each in facts.claims.values() if each.namespace == pod.namespace]
    if any(each.groups for each in claims) and not (facts.named and facts.named.containers):
        return NOT_LISTED_YET
    return NOT_READ_YET if any(each.uid in facts.in_question for each in claims) else ""
