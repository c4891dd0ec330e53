"""The kubelet's allocation to a container: by our device plugin, by a claim, or by another device plugin.

Nothing is asked and nothing changes here: the handler asks the kubelet before, and hands in what is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nri_gpu.domain.allocation import PodDevices
from nri_gpu.domain.container import Container
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.dra.read_claims import by_markers
from nri_gpu.kubelet.allocations import by_tokens
from nri_gpu.kubelet.read_listing import Listing, by_listing
from nri_gpu.policy.kubelet_settings import KubeletSettings


class AllocationFacts(Struct, frozen=True):
    """The facts, apart from the container itself, from which its allocation is read."""

    token_key: bytes | None  # None while there is none
    marker_key: bytes
    claims: Mapping[ClaimUid, PreparedClaim]  # on this node
    named: PodDevices | None  # by PodResources, for a pod that may be of a claim's PodGroup; None without an answer
    listing: Listing | None  # what PodResources says of its pod; None where it is not asked
    inventory: Inventory
    settings: KubeletSettings


def read_allocation(container: Container, facts: AllocationFacts) -> Container:
    """Return the container with what the kubelet allocated to it; the same object where that is nothing.

    What is signed is read before what is only listed, and each reader sees what those before it have read: a container
    that has both tokens and markers is refused, and a token counts only if PodResources does not contradict it.
    """
    container = by_tokens(container, facts.token_key)
    if container.markers:
        container = by_markers(container, facts.marker_key, facts.claims, facts.named)
    return by_listing(container, facts.listing, facts.inventory, facts.settings)
