"""The ledger: which container holds which GPU, which are reserved or being released, and who is on each GPU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import ContainerId, DeviceNumber, FirstProcess, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimHold, ClaimUid, PreparedClaim
from nri_gpu.domain.value import Recorded
from nri_gpu.ledger.holders import DriverDevice, ExternalAllocation, Releasing, Reservation, Usage, taken


class GrantPhase(StrEnum):
    """The stage that a granted container has reached."""

    CREATED = "created"
    RUNNING = "running"
    LOST = "lost"  # the runtime says that it is over, or does not list it; whether its processes are gone is looked at
    LAPSED = "lapsed"


class Lapse(StrEnum):
    """The rule by which a created container lapses when it has no deadline."""

    AFTER_GRACE = "grace"  # the policy's `created_grace_s` after it was created
    # Never where the runtime listed it as created: it may be in the middle of its start, an event that we then do not
    # get. It holds until it is removed or its pod's next attempt is made: too long if it failed, never granted twice.
    NEVER = "inf"


class Entry(Recorded, frozen=True):
    """A grant in the ledger."""

    grant: Grant
    phase: GrantPhase
    since: float  # when this phase began, seconds on the monotonic clock
    until: Lapse | float = Lapse.AFTER_GRACE  # when it lapses unless it starts, on the same clock
    pod_gone: bool = False  # its pod's sandbox is gone, and processes of the container may live on
    allocation: Allocated | None = None  # by a device plugin of the kubelet
    remembered: bool = False  # only the journal has it, so the answer with the grant may be lost

    def is_over(self, now: float, grace_s: float) -> bool:
        """Return whether it was created and should have started by now. grace_s: the policy's `created_grace_s`."""
        return now > self.deadline(grace_s)

    def deadline(self, grace_s: float) -> float:
        """Return the time by which it should have started; infinite where it did, or may at any time."""
        if self.phase is not GrantPhase.CREATED or self.until is Lapse.NEVER:
            return math.inf
        # An infinite grace: no refused start is heeded, and only a walk that finds no process ends the wait.
        return self.since + grace_s if self.until is Lapse.AFTER_GRACE or math.isinf(grace_s) else self.until

    def lapsed(self, now: float) -> Entry:
        """Return the entry as one that holds nothing from now on."""
        return replace(self, phase=GrantPhase.LAPSED, since=now, until=Lapse.AFTER_GRACE)

    @property
    def holds(self) -> bool:
        """Return whether it keeps its GPUs from others."""
        return self.phase is not GrantPhase.LAPSED

    @property
    def lost(self) -> bool:
        """Return whether the runtime says that it is over, while its processes may not be."""
        return self.phase is GrantPhase.LOST

    @property
    def ran(self) -> bool:
        """Return whether a process of it was started, and may use its GPUs."""
        return self.phase is GrantPhase.RUNNING or self.lost

    @property
    def used_exclusively(self) -> bool:
        """Return whether a process of it may have its GPUs alone. A container listed as created may be starting."""
        return (self.ran or self.until is Lapse.NEVER) and self.grant.mode is Mode.EXCLUSIVE

    def succeeds(self, other: Entry) -> bool:
        """Return whether it is the next attempt at a lost container and holds all that the lost one holds."""
        same = other.lost and not self.lost and _name(self.grant) == _name(other.grant)
        return same and set(self.grant.held) >= set(other.grant.held)


class Live(Struct, frozen=True):
    """The devices that an existing container has, whichever component assigned them, and whatever it was granted."""

    container_id: ContainerId
    container: str
    pod_id: PodId
    pod: str  # `namespace/name`
    numbers: frozenset[DeviceNumber] = frozenset()  # of the devices that it can open
    staged: frozenset[str] = frozenset()  # generations of driver files that it mounts
    lost_since: float | None = None  # as for a lost entry, seconds on the monotonic clock; None if it is not lost
    pod_uid: PodUid = PodUid("")  # empty where an earlier daemon's file has the container


class Ledger(Struct, frozen=True, dict=True):
    """The holders of a node's GPUs. `apply` (ledger/apply.py) makes the next one of it."""

    entries: Mapping[ContainerId, Entry] = {}  # grants
    # GPUs that containers can open and were not granted: made of `live`, whose numbers may be other GPUs' tomorrow, and
    # of `prepared`, where no such container is there yet.
    external: Mapping[ContainerId, ExternalAllocation] = {}
    releasing: Mapping[GpuUuid, Releasing] = {}  # GPUs that other pods wait for
    live: Mapping[ContainerId, Live] = {}  # the devices that containers have
    reservations: Mapping[AllocatedDevice, Reservation] = {}
    claims: Mapping[ClaimUid, PreparedClaim] = {}  # each holds its GPUs for its pods
    prepared: Mapping[ContainerId, DriverDevice] = {}  # by NVIDIA's DRA driver; by their ids
    processes: Mapping[ContainerId, FirstProcess] = {}  # of containers that were started and have devices
    stuck: frozenset[GpuUuid] = frozenset()  # no pod should be sent there: lost containers hold them for long
    unlisted: Mapping[AllocatedDevice, float] = {}  # reservations that PodResources does not list, and since when
    in_question: frozenset[ClaimUid] = frozenset()  # claims to prepare again: their pods may have changed
    # Containers that may start and do not run yet by the runtime's word, and since when they are to be stopped.
    starting: Mapping[ContainerId, float | None] = {}
    # Holders whose processes nobody has named or looked for since a list at that time; each holds until that is done.
    unsought: Mapping[ContainerId, float] = {}

    def usage(self) -> Mapping[GpuUuid, Usage]:
        """GPU -> who is on it; GPUs that nobody holds, and nobody has just left, are absent."""
        return self._usage

    @cached_property  # the followers of each change ask for it as well
    def _usage(self) -> Mapping[GpuUuid, Usage]:
        grants: defaultdict[GpuUuid, dict[ContainerId, Grant]] = defaultdict(dict)
        reservations: defaultdict[GpuUuid, dict[AllocatedDevice, Reservation]] = defaultdict(dict)
        external: defaultdict[GpuUuid, dict[ContainerId, ExternalAllocation]] = defaultdict(dict)
        claims: defaultdict[GpuUuid, dict[ClaimUid, ClaimHold]] = defaultdict(dict)
        for id_, entry in self.holding.items():
            for uuid in entry.grant.held:
                grants[uuid][id_] = entry.grant
        for device, each in self.reservations.items():
            reservations[device.uuid][device] = each
        for id_, other in self.external.items():
            for uuid in other.held:
                external[uuid][id_] = other
        for uid, claim in self.claims.items():
            for uuid, mode in claim.holds.items():
                claims[uuid][uid] = ClaimHold(claim, mode)
        found = (grants, reservations, external, self.releasing, claims)
        return {
            uuid: Usage(
                grants.get(uuid, {}),
                reservations.get(uuid, {}),
                external.get(uuid, {}),
                self.releasing.get(uuid),
                claims.get(uuid, {}),
                frozenset(id_ for id_ in grants.get(uuid, {}) if self.entries[id_].lost),
            )
            for uuid in dict.fromkeys(chain.from_iterable(found))
        }

    @cached_property
    def holding(self) -> Mapping[ContainerId, Entry]:
        """Map containers to the entries that hold; a lost container and its next attempt count once."""
        holding = {id_: entry for id_, entry in self.entries.items() if entry.holds}
        lost = {id_: entry for id_, entry in holding.items() if entry.lost}
        if not lost:
            return holding
        next_ = defaultdict[tuple[PodUid, str], list[Entry]](list)
        for entry in holding.values():
            next_[_name(entry.grant)].append(entry)
        succeeded = {id_ for id_, old in lost.items() if any(new.succeeds(old) for new in next_[_name(old.grant)])}
        return without(holding, succeeded)

    def attempts(self, pod_uid: PodUid, name: str) -> Mapping[ContainerId, Entry]:
        """Return the containers of that pod and name."""
        return {id_: entry for id_, entry in self.entries.items() if _name(entry.grant) == (pod_uid, name)}

    def outdone(self, by: Grant) -> Mapping[ContainerId, PodId]:
        """Find created containers that hold nothing, and of whose GPUs a grant of this ledger took some.

        With their sandboxes.
        """
        lapsed = {id_: each.grant for id_, each in self.entries.items() if not each.holds}
        some = {id_: grant for id_, grant in lapsed.items() if not set(by.held).isdisjoint(grant.held)}
        usage = self.usage() if some else {}
        return {id_: grant.pod_id for id_, grant in some.items() if taken(grant, usage)}

    def held_against(self, grant: Grant) -> Mapping[GpuUuid, tuple[str, ...]]:
        """Map the GPUs of a container's grant that others hold in a mode which does not go with it to these others."""
        if grant.mode is None:
            return {}
        usage = self.without_containers({grant.container_id}).usage()
        found = {uuid: usage[uuid].held_against(grant.mode, grant.pod_uid) for uuid in grant.held if uuid in usage}
        return {uuid: others for uuid, others in found.items() if others}

    def holders_by_request(self) -> frozenset[ContainerId]:
        """Return the containers that hold GPUs which neither the kubelet nor a claim allocated to them."""
        claimed = {(uid, uuid) for each in self.claims.values() for uid in each.pods for uuid in each.holds}
        return frozenset(
            id_
            for id_, each in self.entries.items()
            if each.holds and not each.allocation
            if any((each.grant.pod_uid, uuid) not in claimed for uuid in each.grant.held)
        )

    def running_before(self, container_id: ContainerId, pod_uid: PodUid, name: str) -> tuple[ContainerId, ...]:
        """Return the other containers of that pod and name that run, as far as is known."""
        return tuple(
            id_
            for id_, entry in self.attempts(pod_uid, name).items()
            if (entry.phase is GrantPhase.RUNNING or (entry.phase is GrantPhase.CREATED and id_ in self.processes))
            and id_ != container_id
        )

    def lost_before(self, pod_uid: PodUid, name: str) -> Mapping[ContainerId, Entry]:
        """Return the earlier attempts at a container whose processes may live on."""
        return {id_: entry for id_, entry in self.attempts(pod_uid, name).items() if entry.lost}

    def may_start(self, container_id: ContainerId) -> bool:
        """Return whether a container may start: not if it is lost, or if it lapsed and others hold its GPUs.

        One that a list lacks, and whose processes are being looked for, starts like one that lapsed: the runtime may
        list it nowhere yet, and others may have had its GPUs since.
        """
        entry = self.entries.get(container_id)
        if entry is None or (entry.holds and not entry.lost and container_id not in self.unsought):
            return True
        return not (entry.lost and container_id in self.processes) and not taken(entry.grant, self.usage())

    def overdue(self, now: float, grace_s: float) -> frozenset[ContainerId]:
        """Return the containers that should have started by now. grace_s: the policy's `created_grace_s`."""
        return frozenset(id_ for id_, entry in self.entries.items() if entry.is_over(now, grace_s))

    @cached_property  # a look at processes asks six times
    def lost(self) -> Mapping[ContainerId, float]:
        """Map containers that are over or not listed, and may have processes, to the time since when."""
        entries = {id_: each.since for id_, each in self.entries.items() if each.phase is GrantPhase.LOST}
        lives = {id_: each.lost_since for id_, each in self.live.items() if each.lost_since is not None}
        return lives | entries

    @property
    def may_live(self) -> Set[ContainerId]:
        """Return the containers whose processes can be looked at, or are looked for."""
        return self.processes.keys() | self.unsought.keys()

    def with_processes(self, processes: Mapping[ContainerId, FirstProcess]) -> Ledger:
        """Add the first processes of containers; a cgroup counts only for the first container that has it."""
        known, of = dict(self.processes), {each.cgroup: id_ for id_, each in self.processes.items()}
        for id_, process in processes.items():
            known[id_] = process if of.setdefault(process.cgroup, id_) == id_ else replace(process, cgroup=None)
        if known == self.processes:
            return self
        return replace(self, processes=known, unsought=without(self.unsought, processes.keys()))

    def with_live(self, live: Live) -> Ledger:
        if self.live.get(live.container_id) == live:
            return self
        return replace(self, live={**self.live, live.container_id: live})

    def with_all_external(self, external: Mapping[ContainerId, ExternalAllocation]) -> Ledger:
        """Put these in place of all containers that can open GPUs which they were not granted."""
        return self if external == self.external else replace(self, external=external)

    def with_releasing(self, releasing: Mapping[GpuUuid, Releasing]) -> Ledger:
        """Put these in place of all GPUs that are kept for a while from other pods than those that released them."""
        return self if releasing == self.releasing else replace(self, releasing=releasing)

    def generations(self) -> frozenset[str]:
        """Return the driver generations that containers still have mounted, and those of compatibility packages."""
        granted = frozenset(each for entry in self.entries.values() for each in entry.grant.generations)
        return granted.union(*(live.staged for live in self.live.values()))

    def with_entry(self, entry: Entry) -> Ledger:
        """Put an entry in place of any of the same container."""
        return replace(self, entries={**self.entries, entry.grant.container_id: entry})

    def with_reservation(self, reservation: Reservation) -> Ledger:
        """Put a reservation in place of any of the same device."""
        return replace(self, reservations={**self.reservations, reservation.device: reservation})

    def without_containers(self, container_ids: Iterable[ContainerId]) -> Ledger:
        """Forget all that is known of these containers; unknown ids change nothing."""
        gone = (self.entries.keys() | self.external.keys() | self.live.keys()) & frozenset(container_ids)
        if not gone:
            return self
        entries, external = without(self.entries, gone), without(self.external, gone)
        live, processes = without(self.live, gone), without(self.processes, gone)
        starting, unsought = without(self.starting, gone), without(self.unsought, gone)
        anew = replace(self, entries=entries, external=external, live=live, processes=processes)
        return replace(anew, starting=starting, unsought=unsought)

    def without_reservations(self, devices: Iterable[AllocatedDevice]) -> Ledger:
        """Drop the reservations of these devices; other devices change nothing."""
        gone = self.reservations.keys() & frozenset(devices)
        return replace(self, reservations=without(self.reservations, gone)) if gone else self


def _name(grant: Grant) -> tuple[PodUid, str]:
    """Return by what the attempts at one container know each other."""
    return grant.pod_uid, grant.container_name


K = TypeVar("K")
V = TypeVar("V")


def without(items: Mapping[K, V], gone: Set[K]) -> Mapping[K, V]:
    return {key: value for key, value in items.items() if key not in gone}
