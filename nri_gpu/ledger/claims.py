"""The pods of claims: those of a PodGroup, which only the kubelet knows, and those that outlive their claim."""

from __future__ import annotations

from collections.abc import Set

from msgspec.structs import replace

from nri_gpu.domain.allocation import PodDevices
from nri_gpu.domain.container import Pod, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.ledger.ledger import Ledger


def joined(ledger: Ledger, pod: Pod, listed: PodDevices, there: Set[PodUid]) -> tuple[PreparedClaim, ...]:
    """Return, with that pod added, the PodGroups' claims that PodResources now names for one of its containers.

    The kubelet looked in which group the pod is before it made the sandbox. there: pods with a sandbox; members that
    have neither that nor a grant are forgotten.
    """
    living = {entry.grant.pod_uid for entry in ledger.entries.values()} | there
    claims = [each for each in ledger.claims.values() if each.groups and each.namespace == pod.namespace]
    found: list[PreparedClaim] = []
    for claim in (each for each in claims if pod.uid and pod.uid not in each.pods):
        others = tuple(each.name for each in listed.containers if claim.uid not in each.claims)
        if len(others) < len(listed.containers):
            found.append(_with_member(claim, pod, others, claim.members.keys() - living))
    return tuple(found)


def users(ledger: Ledger, claim: PreparedClaim) -> tuple[Grant, ...]:
    """Return what a claim's pods were granted of its GPUs, and still have although the claim is no longer prepared."""
    uuids, there = {each.uuid for each in claim.devices}, ledger.claims.values()
    grants = (entry.grant for entry in ledger.entries.values() if entry.holds)
    return tuple(
        each
        for each in grants
        if each.pod_uid in claim.pods
        and (by_claim := uuids.intersection(each.uuids))
        and not any(each.pod_uid in other.pods and by_claim <= {*other.holds} for other in there)
    )


def _with_member(claim: PreparedClaim, pod: Pod, others: tuple[str, ...], gone: Set[PodUid]) -> PreparedClaim:
    pods = {uid: name for uid, name in claim.pods.items() if uid not in gone}
    members = {uid: names for uid, names in claim.members.items() if uid not in gone}
    return replace(claim, pods={**pods, pod.uid: pod.name}, members={**members, pod.uid: others})
