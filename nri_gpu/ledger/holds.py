"""Holds: each GPU or MIG device with each of its holders, and how the holds of a ledger end in the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.holders import UNUSED, ExternalAllocation, Usage
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.ledger.processes import WARNED_AFTER_S
from nri_gpu.ledger.reservations import reservation_id


class Way(StrEnum):
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


HoldKey = tuple[Way, str, GpuUuid]


class Hold(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device, and one holder of it. holder: the id of a container, a kubelet's device, or a claim."""

    uuid: GpuUuid
    way: Way
    holder: str
    mode: str  # empty for an external allocation
    namespace: str
    pod: str = ""  # its name; empty for a claim
    pod_uid: PodUid = PodUid("")
    container: str = ""
    claim: str = ""  # its name

    @property
    def key(self) -> HoldKey:
        """Return what tells it from every other hold at the same time."""
        return self.way, self.holder, self.uuid


def holds_of(ledger: Ledger) -> Mapping[HoldKey, Hold]:
    """Return all holds of a ledger; monitors hold nothing."""
    found = (hold for uuid, usage in ledger.usage().items() for hold in _holds(uuid, usage))
    return {hold.key: hold for hold in found}


def _holds(uuid: GpuUuid, usage: Usage) -> Iterator[Hold]:
    for id_, grant in usage.grants.items():
        yield Hold(
            uuid=uuid,
            way=Way.GRANTED,
            holder=id_,
            mode=grant.mode or "",
            namespace=grant.namespace,
            pod=grant.pod_name,
            pod_uid=grant.pod_uid,
            container=grant.container_name,
        )
    for device, each in usage.reservations.items():
        yield Hold(
            uuid=uuid,
            way=Way.RESERVED,
            holder=reservation_id(device),
            mode=each.mode,
            namespace=each.namespace,
            pod=each.pod_name,
            pod_uid=each.pod_uid,
        )
    for uid, hold in usage.claims.items():
        if usage.pods.keys().isdisjoint(hold.claim.pods):
            claim = hold.claim
            mode = hold.mode
            yield Hold(uuid=uuid, way=Way.CLAIMED, holder=uid, mode=mode, namespace=claim.namespace, claim=claim.name)
    for id_, other in usage.external.items():
        yield _external(uuid, id_, other)


def _external(uuid: GpuUuid, id_: ContainerId, other: ExternalAllocation) -> Hold:
    namespace, _, pod = other.pod.partition("/")
    return Hold(uuid=uuid, way=Way.EXTERNAL, holder=id_, mode="", namespace=namespace, pod=pod, container=other.name)


def why_ended(hold: Hold, before: Ledger, after: Ledger, now: float) -> End:
    """Return what ended a hold that `before` has and `after` has not. now: seconds on the ledger's clock."""
    match hold.way:
        case Way.GRANTED:
            entry = before.entries[ContainerId(hold.holder)]
            if entry.phase is GrantPhase.CREATED:
                return End.LAPSED if entry.grant.container_id in after.entries else End.REMOVED
            return End.LOST if entry.lost and now - entry.since >= WARNED_AFTER_S else End.ENDED
        case Way.RESERVED:
            grants = after.usage().get(hold.uuid, UNUSED).grants.values()
            return End.PASSED if any(each.pod_uid == hold.pod_uid for each in grants) else End.LAPSED
        case Way.CLAIMED:
            return End.PASSED if hold.holder in after.claims else End.UNPREPARED
        case Way.EXTERNAL:
            return End.ENDED
