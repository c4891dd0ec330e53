"""The holders of one GPU, and whom they keep from it: capacity is judged here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.allocation import NVIDIA_DRIVER, AllocatedDevice
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimHold, ClaimUid, PreparedClaim
from nri_gpu.domain.value import Recorded


class Releasing(Recorded, frozen=True):
    """A GPU or MIG device that one pod held exclusively and has released, while its processes may still use it."""

    pod_uid: PodUid
    pod: str  # `namespace/name`
    since: float  # when its container ended, seconds on the monotonic clock
    grace_s: float  # after which other pods get the GPU whatever NVML shows
    processes: int | None = None  # that NVML has shown on it since; None while NVML could not tell
    first_started: int | None = None  # the container's first process, clock ticks since boot; None if not known

    def blocks(self, pod_uid: PodUid) -> bool:
        """Return whether a container of that pod must wait: exclusive is to the pod, so its own containers need not."""
        return pod_uid != self.pod_uid

    def __str__(self) -> str:
        """`ml/train: 2 processes still hold it`."""
        if self.processes is None:
            return f"{self.pod}: whether processes still hold it is not known yet"
        return f"{self.pod}: {self.processes} process{'es still hold' if self.processes > 1 else ' still holds'} it"


UNKNOWN_POD: Final = PodUid("")
UNNAMED_POD: Final = PodUid("kubelet")  # of a pod that the kubelet has allocated to and nobody has named yet


class Reservation(Recorded, frozen=True, kw_only=True):
    """A device that the kubelet allocated to a pod of which no container has it now.

    It keeps the device's GPU from other pods as a grant does.
    """

    device: AllocatedDevice
    mode: Mode
    namespace: str  # "kubelet" while the pod's name is not known
    pod_name: str  # the resource while the pod's name is not known
    since: float  # when it began, seconds on the monotonic clock
    until: float | None  # when it lapses, on the same clock; None: kept as long as the pod's sandbox exists
    pod_uid: PodUid = UNNAMED_POD
    pod_id: PodId = PodId("")
    container_name: str = "-"
    pod_gone: bool = False  # its pod's sandbox is gone, and the kubelet may make it anew


class DriverDevice(Struct, frozen=True, kw_only=True):
    """A device that NVIDIA's DRA driver prepared for a container, as PodResources lists it."""

    device: str  # `gpu-3`, `gpu-3-mig-1g10gb-19-0`
    namespace: str
    pod_name: str
    container_name: str
    pod_id: PodId = PodId("")  # of the sandbox that runs under that name, or empty
    unlisted_since: float | None = None  # PodResources does not list it any more, seconds on the monotonic clock

    @property
    def id(self) -> ContainerId:
        """Return the id under which its GPU is held: no runtime makes a container id with a slash."""
        names = (NVIDIA_DRIVER, self.device, self.namespace, self.pod_name, self.container_name)
        return ContainerId("/".join(names))


class ExternalAllocation(Recorded, frozen=True):
    """A container that can open GPUs and MIG devices which no signed grant on it names.

    Or one that will: NVIDIA's DRA driver has prepared its device, and no container opens it yet.
    """

    container_id: ContainerId  # or that of a `DriverDevice`
    pod_id: PodId
    pod: str
    uuids: frozenset[GpuUuid]
    # Its name if it was granted other GPUs whose device numbers became these; empty if another component assigned them.
    container: str = ""
    name: str = ""  # the container's name in both cases
    watched: frozenset[GpuUuid] = frozenset()  # of `uuids`, opened but not held: its pod is a monitor
    regained: frozenset[GpuUuid] = frozenset()  # of `uuids`, held again: its pod was a monitor
    device: str = ""  # that was prepared for it; empty for a container that exists
    by: str = ""  # who gave them to it, where an observer knows; empty in a daemon

    @property
    def held(self) -> frozenset[GpuUuid]:
        """Return the GPUs that it keeps from others."""
        return self.uuids - self.watched


STILL_THERE: Final = "ended, but its processes live on: see `nri-gpu status`"
_STRICTEST_FIRST: Final = (Mode.EXCLUSIVE, Mode.MPS, Mode.SHARED)


class Usage(Struct, frozen=True, dict=True):
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

    @cached_property
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
    def others(self) -> Set[PodUid]:
        """Return the pods on it that are not of a claim on it."""
        return self.pods.keys() - frozenset[PodUid]().union(*(each.claim.pods for each in self.claims.values()))

    @property
    def shares(self) -> int:
        """Count who shares it: claims, and pods that are not of one."""
        return len(self.claims) + len(self.others)

    @property
    def load(self) -> int:
        """Count the containers on it, and the reservations and claims without a container."""
        there = {each.pod_id for each in self.external.values() if each.pod_id}
        waiting = sum(each.pod_id not in there for each in self.reservations.values())
        return len(self.grants) + waiting + len(self.external) + len(self.idle_claims)

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

    def held_against(self, mode: Mode, pod_uid: PodUid) -> tuple[str, ...]:
        """Name the other pods and claims that keep this GPU from a container of that pod, by grant or allocation."""
        if not replace(self, external={}).held_from(mode, pod_uid):
            return ()
        pods = {uid: name for uid, name in self.pods.items() if uid != pod_uid}
        claims = (each.claim for each in self.claims.values() if pod_uid not in each.claim.pods)
        return (*pods.values(), *(claim.called for claim in claims if claim.pods.keys().isdisjoint(pods)))

    def held_alone(self, pod: str, pod_uid: PodUid = UNKNOWN_POD) -> tuple[str, ...]:
        """Name the pods and claims beside that pod that have this GPU, one of them exclusively; else return nothing.

        pod: `namespace/name`. pod_uid: left out where only the name is known. The kubelet's allocation to a pod that
        nobody has named yet does not count: it may be this pod's.
        """
        named = {device: each for device, each in self.reservations.items() if each.pod_uid != UNNAMED_POD}
        use = replace(self, reservations=named, lost=frozenset())
        if use.mode is not Mode.EXCLUSIVE:
            return ()
        return use.held_against(Mode.EXCLUSIVE, pod_uid or use._uid_of(pod))

    def _uid_of(self, pod: str) -> PodUid:
        """Return the UID of a pod that holds this GPU, or that a claim on it is reserved for; else an empty one."""
        known = {f"{each.namespace}/{each.pod_name}": each.pod_uid for each in self.holders}
        for each in self.claims.values():
            known |= {f"{each.claim.namespace}/{name}": uid for uid, name in each.claim.pods.items()}
        return known.get(pod, UNKNOWN_POD)

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
        return others or self._opened_beside(pods) or not claims >= self.claims.keys()

    def _opened_beside(self, pods: Set[PodUid]) -> bool:
        """Return whether another component's container can open it that is in no sandbox of these pods' holders.

        What is only prepared for one keeps no pod out that has a container on the GPU: with foreign.conflict = "refuse"
        each would wait for the other.
        """
        sandboxes = {each.pod_id for each in self.holders if each.pod_uid in pods and each.pod_id}
        granted = any(each.pod_uid in pods for each in self.grants.values())
        return any(each.pod_id not in sandboxes and not (each.device and granted) for each in self.external.values())


UNUSED: Final = Usage()


def taken(grant: Grant, usage: Mapping[GpuUuid, Usage]) -> bool:
    """Return whether others hold what was granted, so that the container cannot have it any more."""
    mode = grant.mode
    return mode is not None and any(usage.get(uuid, UNUSED).blocks(mode, grant.pod_uid) for uuid in grant.uuids)
