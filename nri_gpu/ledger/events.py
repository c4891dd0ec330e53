"""The events of the ledger. `apply` (ledger/apply.py) says what follows from each; nothing else changes a ledger.

at: seconds on the monotonic clock, in each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, FirstProcess, Pod, PodId
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.holders import DriverDevice
from nri_gpu.ledger.ledger import Entry, Live
from nri_gpu.ledger.opened import NO_MONITORS, Monitors


class _At(Struct, frozen=True):
    at: float


class Created(_At, frozen=True):
    """CreateContainer was answered, and not refused. grant: None where the container passed."""

    container: Container
    grant: Grant | None = None
    live: Live | None = None


class FoundAtStart(_At, frozen=True):
    """A container is about to start that no list had. grant: by its signed grant; None where the ledger has it."""

    live: Live | None
    grant: Grant | None = None


class Started(_At, frozen=True):
    """A container may start (`Ledger.may_start`). allocation: what its tokens say, where the ledger has none."""

    container_id: ContainerId
    seat: Seat | None = None
    allocation: Allocated | None = None


class PostStarted(_At, frozen=True):
    """A container runs."""

    container_id: ContainerId


class Stopped(_At, frozen=True):
    """The program of a container is over, or the answer about it never left.

    unstarted: the runtime was asked to stop it when it had not started it yet. Its start may go on.
    """

    container_id: ContainerId
    unstarted: bool = False


class Removed(_At, frozen=True):
    """The runtime knows these containers no more; processes of theirs may live on."""

    container_ids: tuple[ContainerId, ...]


class Gone(_At, frozen=True):
    """No process of these containers is left, or none was ever started."""

    container_ids: tuple[ContainerId, ...]


class NeverStarted(_At, frozen=True):
    """Containers were created, should have started by now, and have no process."""

    container_ids: tuple[ContainerId, ...]


class PodGone(_At, frozen=True):
    """A sandbox is gone."""

    pod_id: PodId


class SandboxForgotten(_At, frozen=True):
    """The runtime will not tell of a sandbox's end: it has a newer one of that name, or none of its containers."""

    pod_id: PodId


class Synchronized(_At, frozen=True):
    """The runtime listed its containers."""

    ids: frozenset[ContainerId] = frozenset()  # of all containers
    entries: tuple[Entry, ...] = ()  # of containers with a signed grant
    remembered: tuple[Entry, ...] = ()  # from the journal; the runtime may not have received these answers
    lives: tuple[Live, ...] = ()  # of containers with devices
    processes: Mapping[ContainerId, FirstProcess] = {}  # each container's first process, if it is known
    # Holders that may run, and whose processes neither this list nor the ledger names: their cgroups are looked for.
    unsought: frozenset[ContainerId] = frozenset()


class Sought(_At, frozen=True):
    """A walk through all cgroups of the host looked for these containers. began: when, on the same clock."""

    began: float
    container_ids: frozenset[ContainerId]
    found: Mapping[ContainerId, FirstProcess] = {}  # of them, those that have a process


class DevicesAllocated(_At, frozen=True):
    """The kubelet allocated these to a pod that nobody has named yet."""

    devices: tuple[AllocatedDevice, ...]
    shared: bool = False


class ListedDevice(Struct, frozen=True):
    """A device that PodResources lists. pod: the sandbox that runs under that name, where it is known."""

    device: AllocatedDevice
    namespace: str
    name: str
    container: str
    shared: bool
    pod: Pod | None = None


class Reconciled(_At, frozen=True):
    """PodResources listed what the kubelet allocated. about: the reservations that it could have told of.

    prepared: all devices that NVIDIA's DRA driver prepared.
    """

    listed: tuple[ListedDevice, ...]
    about: frozenset[AllocatedDevice]
    prepared: tuple[DriverDevice, ...] = ()


class DevicesPrepared(_At, frozen=True):
    """PodResources told of one pod for which NVIDIA's DRA driver prepared these."""

    devices: tuple[DriverDevice, ...]


class AllocationKnown(_At, frozen=True):
    """A container's tokens could be read only now."""

    container_id: ContainerId
    allocation: Allocated


class ClaimPrepared(_At, frozen=True):
    """A ResourceClaim is prepared, by what the API server says of it now."""

    claim: PreparedClaim


class ClaimsJoined(_At, frozen=True):
    """The kubelet names claims of PodGroups for one pod more. claims: with that pod."""

    claims: tuple[PreparedClaim, ...]


class ClaimsInQuestion(_At, frozen=True):
    """The pods of these claims may be other ones now; only the API server tells."""

    uids: frozenset[ClaimUid]


class ClaimReleased(_At, frozen=True):
    """A ResourceClaim was unprepared. What its pods' containers have, those hold until they end."""

    uid: ClaimUid


class Looked(_At, frozen=True):
    """NVML was asked for processes at that time.

    processes: how many on each releasing GPU may be of the container that left it; not of those where it cannot tell.
    """

    processes: Mapping[GpuUuid, int]


class ProcessesFound(_At, frozen=True):
    """The first processes of these containers are known."""

    processes: Mapping[ContainerId, FirstProcess]


class HeldForLong(_At, frozen=True):
    """Lost containers hold exactly these GPUs for long."""

    uuids: frozenset[GpuUuid]


class Renumbered(_At, frozen=True):
    """Device numbers may be those of other GPUs, and a pod may be a monitor that was none."""


class Ticked(_At, frozen=True):
    """Time went by."""


LedgerEvent = (
    Created
    | FoundAtStart
    | Started
    | PostStarted
    | Stopped
    | Removed
    | Gone
    | NeverStarted
    | PodGone
    | SandboxForgotten
    | Synchronized
    | Sought
    | DevicesAllocated
    | Reconciled
    | DevicesPrepared
    | AllocationKnown
    | ClaimPrepared
    | ClaimsJoined
    | ClaimsInQuestion
    | ClaimReleased
    | Looked
    | ProcessesFound
    | HeldForLong
    | Renumbered
    | Ticked
)


class Rules(Struct, frozen=True):
    """The policy in force and the node, as far as the ledger needs them."""

    created_grace_s: float  # from a container's creation to its lapse, seconds
    inventory: Inventory  # whose numbers containers open
    waits: bool = True  # whether other pods wait for a GPU that was just released
    grace_s: float = 60.0  # for how long at most, seconds
    unknown_waits: bool = True  # also for a GPU whose processes NVML does not tell
    counted: frozenset[GpuUuid] = frozenset()  # GPUs whose processes NVML tells
    monitors: Monitors = NO_MONITORS  # pods that open GPUs and hold none
    listed_pods: frozenset[PodId] = frozenset()  # that a list brought: the runtime may not tell of their end
