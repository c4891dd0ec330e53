"""Prepared claims in the ledger: each holds its GPUs until it is unprepared, whether containers have them or not."""

from __future__ import annotations

from collections.abc import Set

from msgspec.structs import replace

from nri_gpu.domain.allocation import PodDevices
from nri_gpu.domain.container import Pod, PodUid
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.ledger import Ledger


def prepare(ledger: Ledger, claim: PreparedClaim) -> Ledger:
    """With that claim, in place of any with its UID."""
    if ledger.claims.get(claim.uid) == claim:
        return ledger
    return replace(ledger, claims={**ledger.claims, claim.uid: claim})


def unprepare(ledger: Ledger, *uids: ClaimUid) -> Ledger:
    """Without these claims; others change nothing. What their pods' containers have, those hold until they end."""
    gone = ledger.claims.keys() & set(uids)
    if not gone:
        return ledger
    return replace(ledger, claims={uid: each for uid, each in ledger.claims.items() if uid not in gone})


def join(ledger: Ledger, pod: Pod, listed: PodDevices, there: Set[PodUid]) -> Ledger:
    """With that pod among those of each claim of PodGroups that PodResources names for one of its containers.

    The kubelet looked in which group the pod is before it made the sandbox. there: pods with a sandbox; members that
    have neither that nor a grant are forgotten.
    """
    living = {entry.grant.pod_uid for entry in ledger.entries.values()} | there
    claims = [each for each in ledger.claims.values() if each.groups and each.namespace == pod.namespace]
    for claim in (each for each in claims if pod.uid and pod.uid not in each.pods):
        others = tuple(each.name for each in listed.containers if claim.uid not in each.claims)
        if len(others) < len(listed.containers):
            gone = claim.members.keys() - living
            ledger = prepare(ledger, _with_member(claim, pod, others, gone))
    return ledger


def _with_member(claim: PreparedClaim, pod: Pod, others: tuple[str, ...], gone: Set[PodUid]) -> PreparedClaim:
    pods = {uid: name for uid, name in claim.pods.items() if uid not in gone}
    members = {uid: names for uid, names in claim.members.items() if uid not in gone}
    return replace(claim, pods={**pods, pod.uid: pod.name}, members={**members, pod.uid: others})
