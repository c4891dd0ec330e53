"""ResourceClaims at the NRI plugin: whose devices a container has, and which claims have to be read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import (
    Allocated,
    AllocatedDevice,
    AllocationInvalid,
    AllocationPending,
    KubeletAllocation,
    PodDevices,
)
from nri_gpu.domain.container import MARKERS_MAX, Container, Pod, PodId
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimedDevice, ClaimUid, PreparedClaim
from nri_gpu.domain.text import listed as listed_names
from nri_gpu.domain.text import shown
from nri_gpu.dra.markers import read_marker
from nri_gpu.kubelet.allocations import KubeletPods
from nri_gpu.ledger.ledger import Ledger

_NAME_SHOWN_MAX: Final = 80  # characters
NOT_OURS: Final = (
    "it was not written by nri-gpu for this node since it booted: take the variable out of the pod; where the kubelet "
    "has set it, delete the pods that use its ResourceClaim, all of them"
)
TWO_WAYS: Final = (
    "the kubelet allocated to this container GPUs of a device plugin and of a ResourceClaim: ask in resources.limits "
    "or in resources.claims, not in both"
)
NO_ANSWER_YET: Final = (
    "it is reserved for a PodGroup, and the kubelet has not said yet whether this container names it (PodResources): "
    "it will be tried again; if this lasts, see the log of `nri-gpu run`"
)
NOT_NAMED: Final = (
    "it is reserved for PodGroup {}, and the kubelet's PodResources does not list it for this container: name the "
    "claim in resources.claims of a container or sidecar of a pod of that group, and copy no variable"
)
TOO_MANY: Final = (
    f"with it this container has more than {MARKERS_MAX} devices of claims: give it fewer in resources.claims, and "
    "copy no variable"
)
NOT_ALIKE: Final = (
    "this container has devices of claims that are configured differently, or some for monitoring and others not, but "
    "the GPUs of a container are configured alike: give it devices of one kind"
)


class ClaimAllocations:
    """The pods of claims. A claim that several pods use may have new pods, of which only their own coming tells.

    key: of the markers. pods: sandboxes that may be of a claim's PodGroup, to ask the kubelet about; None where the
    kubelet is not asked.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.pods: KubeletPods | None = None

    def in_question(self, pods: Iterable[Pod], ledger: Ledger) -> frozenset[ClaimUid]:
        """Return the claims that are prepared already, and that one of these pods with a sandbox may share."""
        found: set[ClaimUid] = set()
        claims = [each for each in ledger.claims.values() if not each.owned]
        for pod in pods:
            unknown = [each for each in claims if each.namespace == pod.namespace and pod.uid not in each.pods]
            found.update(each.uid for each in unknown)
            if self.pods is not None and any(each.groups for each in unknown):
                self.pods.add(pod)
        return frozenset(found)

    def pod_gone(self, pod_id: PodId) -> None:
        """Forget a sandbox that is gone."""
        if self.pods is not None:
            self.pods.remove(pod_id)

    def asked_about(self, container: Container, ledger: Ledger) -> PodDevices | None:
        """Ask the kubelet which claims a container with markers names, where one of a PodGroup may be its pod's.

        Return what the kubelet has said of the pod so far, or None.
        """
        claims = (each for each in ledger.claims.values() if each.groups and each.namespace == container.pod.namespace)
        if self.pods is None or all(each.is_for(container) for each in claims):
            return None
        listed = self.pods.devices_of(container.pod)
        self.pods.ask(container.pod)
        return listed


def by_markers(
    container: Container, key: bytes, prepared: Mapping[ClaimUid, PreparedClaim], listed: PodDevices | None
) -> Container:
    """Return a container that has markers, with their devices as its allocation.

    key: of the markers. prepared: the claims on this node. listed: as PodResources lists the container's pod.
    """
    return replace(container, markers={}, kubelet=_allocation(container, key, prepared, listed))


def _allocation(
    container: Container, key: bytes, prepared: Mapping[ClaimUid, PreparedClaim], listed: PodDevices | None
) -> KubeletAllocation:
    first = shown(next(iter(container.markers)), _NAME_SHOWN_MAX)
    if container.kubelet is not None:
        return AllocationInvalid(TWO_WAYS, first)
    if len(container.markers) > MARKERS_MAX:
        return AllocationInvalid(TOO_MANY, first)
    claims: dict[ClaimUid, PreparedClaim] = {}
    devices: dict[tuple[ClaimUid, int], ClaimedDevice] = {}
    for name, text in container.markers.items():
        marker = read_marker(name, text, key)
        if marker is None:
            return AllocationInvalid(NOT_OURS, shown(name, _NAME_SHOWN_MAX))
        claim = prepared.get(marker.claim)
        if claim is None or marker.device >= len(claim.devices):
            return AllocationInvalid(
                "the ResourceClaim that it names is no longer prepared on this node: delete the pods that use it, "
                "all of them",
                shown(name, _NAME_SHOWN_MAX),
            )
        if not claim.is_for(container):
            return _of_others(container, claim, listed)
        claims[claim.uid] = claim
        devices[claim.uid, marker.device] = claim.devices[marker.device]
    return _together(claims, devices.values())


def _of_others(container: Container, claim: PreparedClaim, listed: PodDevices | None) -> KubeletAllocation:
    # Also where the claim is a pod's: other pods may name it, and whoever makes a claim may have it go with a pod.
    if claim.namespace != container.pod.namespace:
        return AllocationInvalid("it is reserved for other pods: this pod copied their variable", _called(claim))
    if claim.groups:
        return _of_group(container, claim, listed)
    return AllocationPending(
        "this pod was not among those that it is reserved for when it was prepared, so `nri-gpu dra` asks the API "
        "server again: it will be tried again; if this lasts, see the log of `nri-gpu dra`",
        _called(claim),
        claim.uid,
    )


def _of_group(container: Container, claim: PreparedClaim, listed: PodDevices | None) -> KubeletAllocation:
    its = listed.container(container.name) if listed else None
    if listed is None or not listed.containers or (its and claim.uid in its.claims):
        return AllocationPending(NO_ANSWER_YET, _called(claim))
    groups = listed_names(shown(each, _NAME_SHOWN_MAX) for each in sorted(claim.groups.values()))
    return AllocationInvalid(NOT_NAMED.format(groups), _called(claim))


def _called(claim: PreparedClaim) -> str:
    return shown(claim.called, _NAME_SHOWN_MAX)


def _together(claims: Mapping[ClaimUid, PreparedClaim], devices: Iterable[ClaimedDevice]) -> KubeletAllocation:
    """Put the devices of a container together as one allocation."""
    found = tuple(devices)
    key = shown(" and ".join(map(_called, claims.values())), 2 * _NAME_SHOWN_MAX)
    if len({(each.mode, each.text, each.admin) for each in found}) != 1:
        return AllocationInvalid(NOT_ALIKE, key)
    return Allocated(
        devices=tuple(AllocatedDevice("claim", each.uuid) for each in found),
        shared=found[0].mode is Mode.SHARED,
        key=key,
        claims=tuple(claims),
        request=found[0].text,
        admin=found[0].admin,
    )
