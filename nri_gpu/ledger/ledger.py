"""The ledger: which container holds which GPU, which are reserved or being released, and who is on each GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from enum import StrEnum
from itertools import chain
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import ContainerId, DeviceNumber, FirstProcess, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimHold, ClaimUid, PreparedClaim
from nri_gpu.domain.value import Recorded


class Releasing(Recorded, frozen=True):
    """A GPU or MIG device that one pod held exclusively and has released, while its processes may still be on it.

    pod: that pod's `namespace/name`. since: seconds on the monotonic clock when its container ended. grace_s: seconds
    after which other pods get the GPU whatever NVML shows. processes: how many NVML has shown on it since; None while
    it could not tell. first_started: its container's first process, in clock ticks since boot; None: not known.
    """

    pod_uid: PodUid
    pod: str
    since: float
    grace_s: float
    processes: int | None = None
    first_started: int | None = None

    def blocks(self, pod_uid: PodUid) -> bool:
        """Return whether a container of that pod must wait: exclusive is to the pod, so its own containers need not."""
        return pod_uid != self.pod_uid

    def __str__(self) -> str:
        """`ml/train: 2 processes still hold it`."""
        if self.processes is None:
            return f"{self.pod}: whether processes still hold it is not known yet"
        return f"{self.pod}: {self.processes} process{'es still hold' if self.processes > 1 else ' still holds'} it"


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
        if self.phase is not GrantPhase.CREATED or self.until is Lapse.NEVER:
            return False
        return now > (self.since + grace_s if self.until is Lapse.AFTER_GRACE else self.until)

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


UNNAMED_POD: Final = PodUid("kubelet")  # of a pod that the kubelet has allocated to and nobody has named yet


class Reservation(Recorded, frozen=True, kw_only=True):
    """A device that the kubelet allocated to a pod of which no container has it now.

    It keeps the device's GPU from others as a grant does. namespace, pod_name: "kubelet" and the resource while nobody
    has named the pod; pod_uid is then UNNAMED_POD. since, until: seconds on the monotonic clock when it began, and when
    it lapses; until None: it is kept as long as the pod's sandbox is there.
    """

    device: AllocatedDevice
    mode: Mode
    namespace: str
    pod_name: str
    since: float
    until: float | None
    pod_uid: PodUid = UNNAMED_POD
    pod_id: PodId = PodId("")
    container_name: str = "-"


class Live(Struct, frozen=True):
    """The devices that an existing container has, whoever assigned them, and whatever it was granted.

    pod: `namespace/name`. numbers: of the devices that it can open. staged: generations of driver files that it mounts.
    lost_since: as an entry that is lost; monotonic seconds, None where it is not.
    """

    container_id: ContainerId
    container: str
    pod_id: PodId
    pod: str
    numbers: frozenset[DeviceNumber] = frozenset()
    staged: frozenset[str] = frozenset()
    lost_since: float | None = None


class ExternalAllocation(Recorded, frozen=True):
    """A container that can open GPUs and MIG devices which no signed grant on it names.

    container: its name, where it was granted other GPUs and its device numbers became these GPUs'; empty where another
    component assigned them. name: its name, whoever assigned them. watched: those of uuids that it opens and does not
    hold, since its pod is a monitor. regained: those that it holds again, since its pod was one.
    """

    container_id: ContainerId
    pod_id: PodId
    pod: str
    uuids: frozenset[GpuUuid]
    container: str = ""
    name: str = ""
    watched: frozenset[GpuUuid] = frozenset()
    regained: frozenset[GpuUuid] = frozenset()

    @property
    def held(self) -> frozenset[GpuUuid]:
        """Return the GPUs that it keeps from others."""
        return self.uuids - self.watched


class Usage(Struct, frozen=True):
    """The holders of one GPU or MIG device."""

    grants: Mapping[ContainerId, Grant] = {}
    reservations: Mapping[AllocatedDevice, Reservation] = {}
    external: Mapping[ContainerId, ExternalAllocation] = {}
    releasing: Releasing | None = None  # the pod that held it before, as long as other pods wait for that
    claims: Mapping[ClaimUid, ClaimHold] = {}
    lost: frozenset[ContainerId] = frozenset()  # of the grants: the runtime says that these containers are over

    @property
    def holders(self) -> tuple[Grant | Reservation, ...]:
        return (*self.grants.values(), *self.reservations.values())

    @property
    def mode(self) -> Mode | None:
        """Return the mode of its holders; None where it has none."""
        # A lapsed container that started while we were away may have left two modes on one GPU.
        modes = {each.mode for each in (*self.holders, *self.claims.values())}
        return next((each for each in _STRICTEST_FIRST if each in modes), None)

    @property
    def pods(self) -> Mapping[PodUid, str]:
        """Map the UIDs of its holders' pods to `namespace/name`, with what is odd about a pod."""
        names = {each.pod_uid: f"{each.namespace}/{each.pod_name}" for each in self.holders}
        lost = (self.grants[each].pod_uid for each in self.lost)
        return names | {uid: f"{names[uid]} ({STILL_THERE})" for uid in lost}

    @property
    def idle_claims(self) -> tuple[str, ...]:
        """List the claims that hold it while no container of their pods does: `claim namespace/name`."""
        pods = self.pods.keys() if self.claims else ()
        return tuple(each.claim.called for each in self.claims.values() if each.claim.pods.keys().isdisjoint(pods))

    @property
    def load(self) -> int:
        """Count the containers, reservations and claims without a container on it."""
        return len(self.grants) + len(self.reservations) + len(self.external) + len(self.idle_claims)

    def blocks(self, mode: Mode, pod_uid: PodUid, claims: Set[ClaimUid] | None = None) -> bool:
        """Return whether a container of that pod cannot have this GPU in that mode. claims: as in `held_from`."""
        if self.held_from(mode, pod_uid, claims):
            return True
        fellows = any(pod_uid in each.claim.pods for each in self.claims.values())  # of the pod that released it
        return self.releasing is not None and self.releasing.blocks(pod_uid) and not fellows

    def held_from(self, mode: Mode, pod_uid: PodUid, claims: Set[ClaimUid] | None = None) -> bool:
        """Return whether its holders of now are why a container of that pod cannot have it.

        claims: those by which the container asks; None: whichever are reserved for its pod.
        """
        ours = {
            uid: each.claim.pods
            for uid, each in self.claims.items()
            if pod_uid in each.claim.pods and (claims is None or uid in claims)
        }
        return self._held_from(mode, {pod_uid}.union(*ours.values()), ours.keys())

    def held_from_claim(self, claim: PreparedClaim, mode: Mode) -> bool:
        """Return whether holders other than the claim's pods keep this GPU from the claim."""
        return self._held_from(mode, claim.pods.keys(), {claim.uid})

    def _held_from(self, mode: Mode, pods: Set[PodUid], claims: Set[ClaimUid]) -> bool:
        """Return whether a holder outside these pods and claims keeps this GPU from `mode`.

        A GPU is never held in two modes.
        """
        if self.mode not in (None, mode):
            return True
        if mode is Mode.SHARED:
            return False
        if mode is Mode.MPS:  # the daemon takes the GPU for itself (EXCLUSIVE_PROCESS)
            return bool(self.external)
        others = any(each.pod_uid not in pods for each in self.holders)
        return others or bool(self.external) or not claims >= self.claims.keys()


STILL_THERE: Final = "over, but its processes are not: see `nri-gpu status`"
_STRICTEST_FIRST: Final = (Mode.EXCLUSIVE, Mode.MPS, Mode.SHARED)
UNUSED: Final = Usage()


class Ledger(Struct, frozen=True):
    """The holders of a node's GPUs. `apply` (ledger/apply.py) makes the next one of it."""

    entries: Mapping[ContainerId, Entry] = {}  # grants
    # GPUs that containers can open and were not granted: made of `live`, whose numbers may be other GPUs' tomorrow.
    external: Mapping[ContainerId, ExternalAllocation] = {}
    releasing: Mapping[GpuUuid, Releasing] = {}  # GPUs that other pods wait for
    live: Mapping[ContainerId, Live] = {}  # the devices that containers have
    reservations: Mapping[AllocatedDevice, Reservation] = {}
    claims: Mapping[ClaimUid, PreparedClaim] = {}  # each holds its GPUs for its pods
    processes: Mapping[ContainerId, FirstProcess] = {}  # of containers that were started and have devices
    stuck: frozenset[GpuUuid] = frozenset()  # no pod should be sent there: lost containers hold them for long
    unlisted: Mapping[AllocatedDevice, float] = {}  # reservations that PodResources does not list, and since when
    in_question: frozenset[ClaimUid] = frozenset()  # claims to prepare again: their pods may have changed

    def usage(self) -> Mapping[GpuUuid, Usage]:
        """GPU -> who is on it; GPUs that nobody holds, and nobody has just left, are absent."""
        grants: defaultdict[GpuUuid, dict[ContainerId, Grant]] = defaultdict(dict)
        reservations: defaultdict[GpuUuid, dict[AllocatedDevice, Reservation]] = defaultdict(dict)
        external: defaultdict[GpuUuid, dict[ContainerId, ExternalAllocation]] = defaultdict(dict)
        claims: defaultdict[GpuUuid, dict[ClaimUid, ClaimHold]] = defaultdict(dict)
        for id_, entry in self._holding().items():
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

    def _holding(self) -> Mapping[ContainerId, Entry]:
        """Return the entries that hold; a lost container and its next attempt count once."""
        holding = {id_: entry for id_, entry in self.entries.items() if entry.holds}
        if not any(entry.lost for entry in holding.values()):
            return holding
        succeeded = {id_ for id_, old in holding.items() if any(new.succeeds(old) for new in holding.values())}
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
        """Return whether a container may start: not if it is lost, or if it lapsed and others hold its GPUs."""
        entry = self.entries.get(container_id)
        return entry is None or not (entry.lost or (not entry.holds and taken(entry.grant, self.usage())))

    def overdue(self, now: float, grace_s: float) -> frozenset[ContainerId]:
        """Return the containers that should have started by now. grace_s: the policy's `created_grace_s`."""
        return frozenset(id_ for id_, entry in self.entries.items() if entry.is_over(now, grace_s))

    @property
    def lost(self) -> Mapping[ContainerId, float]:
        """Map containers that are over or not listed, and may have processes, to the time since when."""
        entries = {id_: each.since for id_, each in self.entries.items() if each.lost}
        lives = {id_: each.lost_since for id_, each in self.live.items() if each.lost_since is not None}
        return lives | entries

    def with_process(self, container_id: ContainerId, process: FirstProcess) -> Ledger:
        """Add the first process of a container; its cgroup counts only if no other container has it."""
        if any(each.cgroup == process.cgroup for id_, each in self.processes.items() if id_ != container_id):
            process = replace(process, cgroup=None)
        if self.processes.get(container_id) == process:
            return self
        return replace(self, processes={**self.processes, container_id: process})

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
        return replace(self, entries=entries, external=external, live=live, processes=processes)

    def without_reservations(self, devices: Iterable[AllocatedDevice]) -> Ledger:
        """Drop the reservations of these devices; other devices change nothing."""
        gone = self.reservations.keys() & frozenset(devices)
        return replace(self, reservations=without(self.reservations, gone)) if gone else self


def _name(grant: Grant) -> tuple[PodUid, str]:
    """Return by what the attempts at one container know each other."""
    return grant.pod_uid, grant.container_name


def taken(grant: Grant, usage: Mapping[GpuUuid, Usage]) -> bool:
    """Return whether others hold what was granted, so that the container cannot have it any more."""
    mode = grant.mode
    return mode is not None and any(usage.get(uuid, UNUSED).blocks(mode, grant.pod_uid) for uuid in grant.uuids)


K = TypeVar("K")
V = TypeVar("V")


def without(items: Mapping[K, V], gone: Set[K]) -> Mapping[K, V]:
    return {key: value for key, value in items.items() if key not in gone}
