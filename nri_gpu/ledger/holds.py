"""Holds: the GPUs and MIG devices of each holder, and what ends the holds of a ledger that the next one has not."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import chain

from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.ledger.holders import UNUSED, ExternalAllocation, Reservation
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.ledger.processes import WARNED_AFTER_S
from nri_gpu.ledger.reservations import reservation_id


class HoldWay(StrEnum):
    """The way in which a GPU is held."""

    GRANTED = "granted"  # to a container
    RESERVED = "reserved"  # for a pod to which the kubelet allocated it, and of which no container has it
    CLAIMED = "claimed"  # by a prepared claim, while no container of its pods has it
    EXTERNAL = "external"  # by a container to which another component gave it


class End(StrEnum):
    """The cause of a hold's end."""

    ENDED = "ended"  # the container
    REMOVED = "removed"  # the container, before it ran
    LAPSED = "lapsed"  # the container did not start in time, or its pod is over
    LOST = "lost"  # the last process of a container that had been over for the runtime for a while
    UNPREPARED = "unprepared"  # the claim
    PASSED = "passed"  # to a container of its pod


HoldKey = tuple[HoldWay, str]


class Hold(Struct, frozen=True, kw_only=True):
    """The GPUs and MIG devices of one holder. holder: the id of a container, a kubelet's device, or a claim."""

    uuids: tuple[GpuUuid, ...]
    way: HoldWay
    holder: str
    mode: str  # empty for an external allocation
    namespace: str
    pod: str = ""  # its name; empty for a claim
    pod_uid: PodUid = PodUid("")
    container: str = ""
    claim: str = ""  # its name
    part: float = 1.0  # of each device, that a scheduler of fractions gave to the pod

    @property
    def key(self) -> HoldKey:
        """Return what tells it from every other hold at the same time."""
        return self.way, self.holder


def holds_of(ledger: Ledger) -> Mapping[HoldKey, Hold]:
    """Return all holds of a ledger; monitors hold nothing."""
    found = chain(
        (_granted(each) for each in ledger.holding.values() if each.grant.held),
        map(_reserved, ledger.reservations.values()),
        (_claimed(each, uuids) for each in ledger.claims.values() if (uuids := _waiting(each, ledger))),
        (_external(each) for each in ledger.external.values() if each.held),
    )
    return {hold.key: hold for hold in found}


def _granted(entry: Entry) -> Hold:
    grant = entry.grant
    return Hold(
        uuids=grant.held,
        way=HoldWay.GRANTED,
        holder=grant.container_id,
        mode=grant.mode or "",
        namespace=grant.namespace,
        pod=grant.pod_name,
        pod_uid=grant.pod_uid,
        container=grant.container_name,
        part=entry.allocation.part if entry.allocation else 1.0,
    )


def _reserved(kept: Reservation) -> Hold:
    return Hold(
        uuids=(kept.device.uuid,),
        way=HoldWay.RESERVED,
        holder=reservation_id(kept.device),
        mode=kept.mode,
        namespace=kept.namespace,
        pod=kept.pod_name,
        pod_uid=kept.pod_uid,
    )


def _waiting(claim: PreparedClaim, ledger: Ledger) -> tuple[GpuUuid, ...]:
    """Return those of a claim's GPUs that no container of its pods has."""
    usage = ledger.usage()
    return tuple(uuid for uuid in claim.holds if usage[uuid].pods.keys().isdisjoint(claim.pods))


def _claimed(claim: PreparedClaim, uuids: tuple[GpuUuid, ...]) -> Hold:
    mode = claim.holds[uuids[0]]
    return Hold(
        uuids=uuids, way=HoldWay.CLAIMED, holder=claim.uid, mode=mode, namespace=claim.namespace, claim=claim.name
    )


def _external(other: ExternalAllocation) -> Hold:
    namespace, _, pod = other.pod.partition("/")
    return Hold(
        uuids=tuple(sorted(other.held)),
        way=HoldWay.EXTERNAL,
        holder=other.container_id,
        mode="",
        namespace=namespace,
        pod=pod,
        container=other.name,
    )


def why_ended(hold: Hold, before: Ledger, after: Ledger, now: float) -> End:
    """Return what ended a hold that `before` has and `after` has not. now: seconds on the ledger's clock."""
    match hold.way:
        case HoldWay.GRANTED:
            entry = before.entries[ContainerId(hold.holder)]
            if entry.phase is GrantPhase.CREATED:
                return End.LAPSED if entry.grant.container_id in after.entries else End.REMOVED
            return End.LOST if entry.lost and now - entry.since >= WARNED_AFTER_S else End.ENDED
        case HoldWay.RESERVED:
            grants = after.usage().get(hold.uuids[0], UNUSED).grants.values()
            return End.PASSED if any(each.pod_uid == hold.pod_uid for each in grants) else End.LAPSED
        case HoldWay.CLAIMED:
            return End.PASSED if hold.holder in after.claims else End.UNPREPARED
        case HoldWay.EXTERNAL:
            return End.ENDED
