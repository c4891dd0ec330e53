"""GPUs that no container has and that are kept from others all the same: reservations, and GPUs being released.

A reservation is a device that the kubelet allocated to a pod of which no container has it now. A request by annotation
cannot have its GPU, and refusals name the pod. A device id has one reservation at most, so that the kubelet's next
answer about an id replaces its last.

    Allocate --for OPEN_S--> (lapses)               --its container is created--> a grant, and the reservation ends
    that container ends --for its pod--> until its sandbox is gone, or the kubelet allocates the id to another pod
    it never starts, or its sandbox is gone --for its pod, for OPEN_S--> (lapses)

In the last case the kubelet may make the pod's sandbox anew with the same devices and without another Allocate; nobody
tells whether it will, or whether the pod is over.

A GPU that a pod held exclusively is being released until no process is on it, or for a grace. The runtime tells when a
container ends, but the driver may go on for a while: it frees memory, or a process that escaped the cgroup still lives.
The next container would share the GPU with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, FirstProcess, Pod, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.ledger.ledger import UNNAMED_POD, Entry, Lapse, Ledger, Releasing, Reservation

# An image of tens of gigabytes is pulled between Allocate and CreateContainer, and nobody tells when a pod is given up.
OPEN_S: Final = 900.0
# Allocate comes before the kubelet lists what it allocated: a reservation that is not listed may be younger.
SETTLED_S: Final = 5.0


def reserve(ledger: Ledger, devices: Iterable[AllocatedDevice], now: float, *, shared: bool) -> Ledger:
    """With these allocated to a pod that nobody has named yet. now: seconds on the monotonic clock."""
    for device in devices:
        fresh = Reservation(
            device=device,
            mode=_mode(shared=shared),
            namespace="kubelet",
            pod_name=device.resource,
            since=now,
            until=now + OPEN_S,
        )
        ledger = ledger.with_reservation(fresh)
    return ledger


def cleared_for(ledger: Ledger, container: Container, now: float) -> Ledger:
    """The ledger that a new container is decided by: what it replaces holds nothing.

    That is earlier attempts at it that never ran, and the reservations that it comes for; those of another pod stay.
    Where PodResources has just told whose the devices are now, they all end: a token may be an old one.
    """
    ledger = ledger.after_attempts(container.id, container.pod.uid, container.name, now)
    allocation = container.kubelet
    if not isinstance(allocation, Allocated):
        return ledger
    return _without(ledger, allocation, (UNNAMED_POD, container.pod.uid) if allocation.key == KUBELET_KEY else None)


def redeem_running(ledger: Ledger, pod_uid: PodUid, allocation: Allocated) -> Ledger:
    """Without what was reserved for the pod of a container that runs."""
    return _without(ledger, allocation, (pod_uid,))


def _without(ledger: Ledger, allocation: Allocated, pods: Sequence[PodUid] | None) -> Ledger:
    """Without the reservations of these devices for one of those pods; None: for whatever pod."""
    known = ((device, ledger.reservations.get(device)) for device in allocation.devices)
    return ledger.without_reservations(
        device for device, each in known if each is not None and (pods is None or each.pod_uid in pods)
    )


def reserve_for_pod(ledger: Ledger, grant: Grant, allocation: Allocated, now: float, *, lapses: bool = True) -> Ledger:
    """With what a container had reserved for its pod: the kubelet starts the container anew with the same devices.

    lapses: after OPEN_S; else only when the pod's sandbox is gone. A device that the kubelet has allocated to another
    pod since stays that pod's.
    """
    for device in allocation.devices:
        if device.uuid not in grant.uuids or grant.mode is None:
            continue
        known = ledger.reservations.get(device)
        if known is None or known.pod_uid == grant.pod_uid:
            fresh = reservation_of(device, grant, grant.mode, now, now + OPEN_S if lapses else None)
            ledger = ledger.with_reservation(fresh)
    return ledger


def reservation_of(device: AllocatedDevice, grant: Grant, mode: Mode, since: float, until: float | None) -> Reservation:
    """The reservation of a device for the pod of a granted container. Times as in `Reservation`."""
    return Reservation(
        device=device,
        mode=mode,
        namespace=grant.namespace,
        pod_name=grant.pod_name,
        since=since,
        until=until,
        pod_uid=grant.pod_uid,
        pod_id=grant.pod_id,
        container_name=grant.container_name,
    )


def sandbox_gone(ledger: Ledger, pod_id: PodId, now: float) -> Ledger:
    """With what was reserved for a sandbox's pod kept for a while longer."""
    for each in ledger.reservations.values():
        if each.pod_id == pod_id:
            ledger = ledger.with_reservation(_lapsing(each, now))
    return ledger


def carried_over(ledger: Ledger, now: float) -> tuple[Reservation, ...]:
    """The reservations of a ledger that is rebuilt. Pods may have gone meanwhile, so all of them lapse."""
    return tuple(_lapsing(each, now) for each in ledger.reservations.values())


def _lapsing(reservation: Reservation, now: float) -> Reservation:
    end = now + OPEN_S
    return replace(reservation, until=end if reservation.until is None else min(reservation.until, end))


class ListedDevice(Struct, frozen=True):
    """One device that PodResources lists. pod: the sandbox that runs under that name, where it is known."""

    device: AllocatedDevice
    namespace: str
    name: str
    container: str
    shared: bool
    pod: Pod | None = None


Unlisted = Mapping[AllocatedDevice, float]  # reservations that PodResources does not list, and since when


def reconcile(
    ledger: Ledger, listed: Iterable[ListedDevice], about: Iterable[AllocatedDevice], unlisted: Unlisted, now: float
) -> tuple[Ledger, Unlisted]:
    """The ledger with the reservations that PodResources lists.

    about: the reservations that the list could have told of; the others stay as they are. now: monotonic seconds.
    """
    here: set[AllocatedDevice] = set()
    for each in _one_for_each_device(listed):
        here.add(each.device)
        if any(_holds(entry.grant, each) for entry in ledger.entries.values() if entry.holds):
            continue  # while a container of the pod has it, nothing need be reserved
        fresh = Reservation(
            device=each.device,
            mode=_mode(shared=each.shared),
            namespace=each.namespace,
            pod_name=each.name,
            since=now,
            until=None,
            pod_uid=each.pod.uid if each.pod else UNNAMED_POD,
            pod_id=each.pod.id if each.pod else PodId(""),
        )
        if not _same(ledger.reservations.get(each.device), fresh):
            ledger = ledger.with_reservation(fresh)
    gone = {each: unlisted.get(each, now) for each in about if each not in here and each in ledger.reservations}
    ledger = ledger.without_reservations(device for device, since in gone.items() if now - since >= SETTLED_S)
    return ledger, {device: since for device, since in gone.items() if device in ledger.reservations}


def _one_for_each_device(listed: Iterable[ListedDevice]) -> Iterable[ListedDevice]:
    """Each device once. Kubelets before 1.34 list pods that are over, too: the pod whose sandbox is here has it.

    Where that does not tell either, the device is no pod's in particular, and the next that comes for it has it.
    """
    found: dict[AllocatedDevice, ListedDevice] = {}
    for each in listed:
        other = found.get(each.device)
        if other is None or (other.pod is None and each.pod is not None):
            found[each.device] = each
        elif each.pod is not None and other.pod is not None and each.pod.id != other.pod.id:
            found[each.device] = replace(other, pod=None)
    return found.values()


def holders(ledger: Ledger, listed: ListedDevice) -> tuple[ContainerId, ...]:
    """Containers of that name in that pod which hold the device."""
    return tuple(
        id_
        for id_, entry in ledger.entries.items()
        if entry.holds and _holds(entry.grant, listed) and entry.grant.container_name == listed.container
    )


def _holds(grant: Grant, listed: ListedDevice) -> bool:
    """Whether a grant to a container of that pod has the device."""
    same_pod = (grant.namespace, grant.pod_name) == (listed.namespace, listed.name)
    return same_pod and listed.device.uuid in grant.uuids


def _same(old: Reservation | None, fresh: Reservation) -> bool:
    """Whether a reservation says already what PodResources says. One that knows the pod's UID says more."""
    if old is None or old.until != fresh.until:
        return False
    if (old.namespace, old.pod_name, old.mode) != (fresh.namespace, fresh.pod_name, fresh.mode):
        return False
    return fresh.pod_uid in (UNNAMED_POD, old.pod_uid)


_ID_PREFIX: Final = "kubelet/"  # no runtime makes a container id with a slash


def reservation_id(device: AllocatedDevice) -> str:
    """What stands for a container's id where a reservation is listed among grants: `kubelet/nvidia.com/gpu=GPU-...`."""
    return f"{_ID_PREFIX}{device.resource}={device.id}"


def reserved_device(listed_id: str) -> AllocatedDevice | None:
    """The device of such an id; None where it is a container's."""
    if not listed_id.startswith(_ID_PREFIX):
        return None
    resource, _, id_ = listed_id.removeprefix(_ID_PREFIX).partition("=")
    return AllocatedDevice(resource, id_)


def _mode(*, shared: bool) -> Mode:
    return Mode.SHARED if shared else Mode.EXCLUSIVE


class Wait(Struct, frozen=True):
    """How to wait for a released GPU. now: monotonic seconds; grace_s: for how long at most.

    awaited: whether to wait for a GPU at all: not where nothing will ever tell of its processes.
    """

    now: float
    grace_s: float
    awaited: Callable[[GpuUuid], bool]


def vacated(
    before: Ledger, after: Ledger, among: Iterable[ContainerId], wait: Wait, reserved: Iterable[AllocatedDevice] = ()
) -> Ledger:
    """`after`, with the GPUs releasing that these containers may have used exclusively and hold no longer.

    reserved: devices whose reservation ended; one without an end was for a pod whose container had run.
    """
    ended: list[tuple[Grant | Reservation, tuple[GpuUuid, ...], FirstProcess | None]] = []
    for container_id in among:
        entry, now = before.entries.get(container_id), after.entries.get(container_id)
        if entry is not None and _used_exclusively(entry) and not (now is not None and now.holds):
            ended.append((entry.grant, entry.grant.uuids, before.processes.get(container_id)))
    for device in reserved:
        each = before.reservations.get(device)
        if each is not None and each.until is None and each.mode is Mode.EXCLUSIVE and device not in after.reservations:
            ended.append((each, (device.uuid,), None))
    left = {
        uuid: Releasing(
            holder.pod_uid,
            f"{holder.namespace}/{holder.pod_name}",
            wait.now,
            wait.grace_s,
            first_started=first.started if first else None,
        )
        for holder, uuids, first in ended
        for uuid in uuids
        if wait.awaited(uuid)
    }
    return after.with_releasing({**after.releasing, **left})


def looked(
    ledger: Ledger, processes: Callable[[GpuUuid, Releasing], int | None], began: float, *, unknown_waits: bool
) -> Ledger:
    """The ledger after NVML was asked for the GPUs' processes.

    processes: how many on one may be of the container that left it. began: when it was asked, monotonic seconds; the
    answer says nothing about GPUs released later. unknown_waits: whether a GPU whose processes NVML cannot tell waits
    for its grace.
    """
    releasing: dict[GpuUuid, Releasing] = {}
    for uuid, left in ledger.releasing.items():
        count = processes(uuid, left)
        if began <= left.since:
            releasing[uuid] = left
        elif count or (count is None and unknown_waits):
            releasing[uuid] = replace(left, processes=count)
    return ledger.with_releasing(releasing)


def expired(ledger: Ledger, now: float) -> Ledger:
    """The ledger without the releasing GPUs whose grace is over."""
    waiting = {uuid: left for uuid, left in ledger.releasing.items() if now - left.since <= left.grace_s}
    return ledger.with_releasing(waiting)


def _used_exclusively(entry: Entry) -> bool:
    ran = entry.ran or entry.until is Lapse.NEVER  # one listed as created may be starting
    return ran and entry.grant.mode is Mode.EXCLUSIVE
