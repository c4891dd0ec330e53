"""Devices that the kubelet allocated to a pod of which no container has them now.

A request by annotation cannot have such a device's GPU, and refusals name the pod. A device id has one reservation at
most, so that the kubelet's next answer about an id replaces its last.

    Allocate --for OPEN_S--> (lapses)               --its container is created--> a grant, and the reservation ends
    that container ends --for its pod--> until its sandbox is gone, or the kubelet allocates the id to another pod
    it never starts, or its sandbox is gone --for its pod, for OPEN_S--> (lapses)
    it ends, and nobody may tell of its sandbox's end --for its pod, for OPEN_S--> (lapses)

None lapses while a container of its pod is created or runs. In the third case the kubelet may make the pod's sandbox
anew with the same devices and without another Allocate; nobody tells whether it will, or whether the pod is over. Where
it allocates the GPU to another pod meanwhile, by another device id, that pod has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, PodId
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.ledger.events import (
    Created,
    DevicesAllocated,
    Gone,
    LedgerEvent,
    ListedDevice,
    PodGone,
    PostStarted,
    Reconciled,
    Removed,
    SandboxForgotten,
    Started,
    Stopped,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.holders import UNNAMED_POD, UNUSED, Reservation
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.request.environment import VARIABLE

# An image of tens of gigabytes is pulled between Allocate and CreateContainer, and nobody tells when a pod is given up.
OPEN_S: Final = 900.0
# Allocate comes before the kubelet lists what it allocated: a reservation that is not listed may be younger.
SETTLED_S: Final = 5.0


def reservations_after(before: Ledger, after: Ledger, event: LedgerEvent, listed_pods: Set[PodId]) -> Ledger:
    """`after`, with what is reserved from now on. listed_pods: as in `Rules`."""
    match event:
        case Created(container=container):
            after = redeemed(after, container)
        case Started(container_id=id_) | PostStarted(container_id=id_) if (
            entry := after.entries.get(id_)
        ) and entry.allocation:
            uid = entry.grant.pod_uid
            after = _without(after, entry.allocation, lambda each: each.pod_uid == uid)
        case DevicesAllocated():
            after = _allocated(after, event)
        case Reconciled():
            after = _reconciled(after, event)
        case PodGone(at, pod_id) | SandboxForgotten(at, pod_id):
            ours = (each for each in after.reservations.values() if each.pod_id == pod_id)
            after = _with_all(after, (replace(_lapsing(each, at), pod_gone=True) for each in ours))
        case Ticked(at):
            known = after.reservations.items()
            over = [device for device, each in known if each.until is not None and at > each.until]
            live = _live_pods(after) if over else frozenset()
            over = [device for device in over if after.reservations[device].pod_id not in live]
            after = after.without_reservations(over) if over else after
        case Synchronized(at):
            return _carried_over(after, at)
        case _:
            pass
    return _kept_for_pods(before, after, event, listed_pods)


def redeemed(ledger: Ledger, container: Container) -> Ledger:
    """End the reservations that a new container comes for; those of another pod stay.

    Another plugin's all end, as PodResources has just told whose the devices are now. A token may be any pod's whose
    name is not known yet; what PodResources lists of our own resource is the named pod's alone.
    """
    allocation, pod = container.kubelet, container.pod
    if not isinstance(allocation, Allocated):
        return ledger

    def is_for(each: Reservation) -> bool:
        if each.pod_uid == pod.uid or allocation.key == VARIABLE:
            return True
        named = allocation.key == KUBELET_KEY or (each.namespace, each.pod_name) == (pod.namespace, pod.name)
        return each.pod_uid == UNNAMED_POD and named

    if not allocation.claims:
        ledger = _without_outdated(ledger, allocation.devices, shared=allocation.shared)
    return _without(ledger, allocation, is_for)


def _without(ledger: Ledger, allocation: Allocated, over: Callable[[Reservation], bool]) -> Ledger:
    """End the reservations of these devices that are over."""
    known = ((device, ledger.reservations.get(device)) for device in allocation.devices)
    return ledger.without_reservations(device for device, each in known if each is not None and over(each))


def _without_outdated(ledger: Ledger, devices: Sequence[AllocatedDevice], *, shared: bool) -> Ledger:
    """End the reservations for pods whose sandbox is gone that keep others from these devices' GPUs.

    devices: allocated since, and maybe of another resource. shared: their mode goes with a shared reservation.
    """
    uuids = {each.uuid for each in devices}
    return ledger.without_reservations(
        device
        for device, each in ledger.reservations.items()
        if each.pod_gone and device.uuid in uuids and device not in devices
        if not (shared and each.mode is Mode.SHARED)
    )


def _with_all(ledger: Ledger, reservations: Iterable[Reservation]) -> Ledger:
    fresh = {each.device: each for each in reservations if ledger.reservations.get(each.device) != each}
    return replace(ledger, reservations={**ledger.reservations, **fresh}) if fresh else ledger


def _allocated(ledger: Ledger, event: DevicesAllocated) -> Ledger:
    fresh = (
        Reservation(
            device=device,
            mode=_mode(shared=event.shared),
            namespace="kubelet",
            pod_name=device.resource,
            since=event.at,
            until=event.at + OPEN_S,
        )
        for device in event.devices
    )
    return _with_all(_without_outdated(ledger, event.devices, shared=event.shared), fresh)


def _kept_for_pods(before: Ledger, after: Ledger, event: LedgerEvent, listed_pods: Set[PodId]) -> Ledger:
    """Reserve what containers held of the kubelet's and hold no more: it starts them anew with the same devices.

    Until the pod's sandbox is gone where both ends are told, else for OPEN_S. A device that the kubelet has allocated
    to another pod since stays that pod's. listed_pods: as in `Rules`.
    """
    if after.entries is before.entries:
        return after
    now = {id_: each for id_, each in after.entries.items() if each.holds}
    left = [(old, old.allocation) for id_, old in before.entries.items() if old.holds and id_ not in now]
    # A container's next attempt may have come while its processes lived.
    others = (each.allocation.devices for each in now.values() if each.allocation)
    taken = frozenset(chain.from_iterable(others)) if left else frozenset[AllocatedDevice]()
    ended = isinstance(event, Stopped | Removed | Gone)
    untold: set[PodId] = set()
    for old, allocation in left:
        pod_gone = old.pod_gone or isinstance(event, PodGone)
        until = None if ended and not pod_gone else event.at + OPEN_S
        for device in allocation.devices if allocation else ():
            known, mode = after.reservations.get(device), old.grant.mode
            ours = device not in taken and (known is None or known.pod_uid == old.grant.pod_uid)
            if mode is not None and device.uuid in old.grant.uuids and ours:
                kept = reservation_of(device, old.grant, mode, event.at, until)
                after = after.with_reservation(replace(kept, pod_gone=pod_gone))
                untold.update({old.grant.pod_id} & listed_pods)
    return _lapsing_from(after, untold, event.at) if untold else after


def _lapsing_from(ledger: Ledger, pod_ids: Set[PodId], at: float) -> Ledger:
    """Let all that is reserved for these sandboxes lapse after OPEN_S."""
    ours = (each for each in ledger.reservations.values() if each.pod_id in pod_ids)
    return _with_all(ledger, (replace(each, until=at + OPEN_S) for each in ours))


def _live_pods(ledger: Ledger) -> frozenset[PodId]:
    """Return the sandboxes of which a container with GPUs is created or runs, whoever gave it these."""
    lost = ledger.lost
    granted = (each.grant.pod_id for each in ledger.entries.values() if each.holds and not each.lost)
    others = (each.pod_id for id_, each in ledger.external.items() if id_ not in lost)
    return frozenset(filter(None, chain(granted, others)))  # a reservation for an unnamed pod has no sandbox


def reservation_of(device: AllocatedDevice, grant: Grant, mode: Mode, since: float, until: float | None) -> Reservation:
    """Make the reservation of a device for the pod of a granted container. Times as in `Reservation`."""
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


def _carried_over(ledger: Ledger, at: float) -> Ledger:
    """Give each reservation an end, since pods may have gone while nobody told; grants push them aside."""
    usage = replace(ledger, external={}, reservations={}).usage()
    kept = {
        device: _lapsing(each, at)
        for device, each in ledger.reservations.items()
        if not usage.get(device.uuid, UNUSED).held_from(each.mode, each.pod_uid)
    }
    return ledger if kept == ledger.reservations else replace(ledger, reservations=kept)


def _lapsing(reservation: Reservation, now: float) -> Reservation:
    end = now + OPEN_S
    return replace(reservation, until=end if reservation.until is None else min(reservation.until, end))


def _reconciled(ledger: Ledger, event: Reconciled) -> Ledger:
    """Take the reservations that PodResources lists, and end those that it has not listed for SETTLED_S."""
    here: set[AllocatedDevice] = set()
    for each in _one_for_each_device(event.listed):
        here.add(each.device)
        ledger = _without_outdated(ledger, (each.device,), shared=each.shared)
        if any(has_listed(entry.grant, each) for entry in ledger.entries.values() if entry.holds):
            continue  # while a container of the pod has it, nothing need be reserved
        fresh = Reservation(
            device=each.device,
            mode=_mode(shared=each.shared),
            namespace=each.namespace,
            pod_name=each.name,
            since=event.at,
            until=None,
            pod_uid=each.pod.uid if each.pod else UNNAMED_POD,
            pod_id=each.pod.id if each.pod else PodId(""),
        )
        if not _same(ledger.reservations.get(each.device), fresh):
            ledger = ledger.with_reservation(fresh)
    gone = {
        each: ledger.unlisted.get(each, event.at)
        for each in event.about
        if each not in here and each in ledger.reservations
    }
    ledger = ledger.without_reservations(device for device, since in gone.items() if event.at - since >= SETTLED_S)
    unlisted = {device: since for device, since in gone.items() if device in ledger.reservations}
    return ledger if unlisted == ledger.unlisted else replace(ledger, unlisted=unlisted)


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


def has_listed(grant: Grant, listed: ListedDevice) -> bool:
    """Return whether a grant is to a container of a listed device's pod and has that device."""
    same_pod = (grant.namespace, grant.pod_name) == (listed.namespace, listed.name)
    return same_pod and listed.device.uuid in grant.uuids


def _same(old: Reservation | None, fresh: Reservation) -> bool:
    """Return whether a reservation says already what PodResources says. A reservation with the pod's UID says more."""
    if old is None or old.until != fresh.until:
        return False
    if (old.namespace, old.pod_name, old.mode) != (fresh.namespace, fresh.pod_name, fresh.mode):
        return False
    return fresh.pod_uid in (UNNAMED_POD, old.pod_uid)


_ID_PREFIX: Final = "kubelet/"  # no runtime makes a container id with a slash


def reservation_id(device: AllocatedDevice) -> str:
    """Return the id of a reservation where it is listed among grants: `kubelet/nvidia.com/gpu=GPU-...`."""
    return f"{_ID_PREFIX}{device.resource}={device.id}"


def reserved_device(listed_id: str) -> AllocatedDevice | None:
    """Return the device of a reservation's id; None where the id is a container's."""
    if not listed_id.startswith(_ID_PREFIX):
        return None
    resource, _, id_ = listed_id.removeprefix(_ID_PREFIX).partition("=")
    return AllocatedDevice(resource, id_)


def _mode(*, shared: bool) -> Mode:
    return Mode.SHARED if shared else Mode.EXCLUSIVE
