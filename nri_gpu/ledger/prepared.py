"""GPUs whose devices NVIDIA's DRA driver prepared: they are held before a container exists that opens them.

prepared --a container of that name opens it--> that container's external allocation, as long as it is there
PodResources has not listed it for SETTLED_S --> nobody's

Its sandbox's end ends nothing: the kubelet may make that anew for the same claim, and unprepares a claim later. So a
list counts that lacks it SETTLED_S after that end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.resource_claim import profile_label
from nri_gpu.ledger.events import DevicesPrepared, LedgerEvent, PodGone, Reconciled
from nri_gpu.ledger.holders import DriverDevice, ExternalAllocation
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import Monitors
from nri_gpu.ledger.reservations import SETTLED_S

# dra-driver-nvidia-gpu: cmd/gpu-kubelet-plugin/deviceinfo.go, mig.go (CanonicalName). Its numbers are minors.
_GPU: Final = re.compile(r"gpu-([0-9]{1,6})(?:-.{1,63})?")
_MIG: Final = re.compile(r"gpu-[0-9]+-mig-(.+)-[0-9]+-([0-9]{1,6})")  # profile, its number, first memory slice
VFIO: Final = re.compile(r"gpu-vfio-[0-9]+")  # a GPU that is bound to another kernel driver, and no GPU of NVML's


def minor_of(device: str) -> int | None:
    """Return the minor number of the GPU that a device is, or is part of, by its name; None if the name has none."""
    found = _GPU.fullmatch(device)
    return int(found[1]) if found else None


def gpu_of(device: str, inventory: Inventory) -> Gpu | None:
    """Return the GPU that a device is, or is part of; None if this node has none of that number."""
    minor = minor_of(device)
    return next((gpu for gpu in inventory.gpus if gpu.minor_number == minor), None)


def prepared_uuids(device: str, inventory: Inventory) -> frozenset[GpuUuid]:
    """Return the GPU or MIG devices that a device is; empty if this node has no such GPU.

    A MIG device that is not made yet, or that is not known by its placement, is all that it may be.
    """
    gpu = gpu_of(device, inventory)
    if gpu is None:
        return frozenset()
    mig = _MIG.fullmatch(device)
    alike = [part for part in gpu.mig if mig and profile_label(part.profile) == mig[1]]
    found = frozenset(part.uuid for part in alike if mig and part.placement in (None, int(mig[2])))
    return found or frozenset({gpu.uuid, *(part.uuid for part in gpu.mig)})


def prepared_after(ledger: Ledger, event: LedgerEvent) -> Ledger:
    """Return the ledger with what is prepared after an event."""
    known = ledger.prepared
    match event:
        case DevicesPrepared(_, devices):
            found = {**known, **_named(known, devices)}
        case Reconciled(at, prepared=listed):
            fresh = _named(known, listed)
            found = {**_settling(known, fresh.keys(), at), **fresh}
        case PodGone(at, pod_id) if pod_id:
            ended = {id_: each for id_, each in known.items() if each.pod_id == pod_id}
            found = {**known, **{id_: _ended(each, at) for id_, each in ended.items()}}
        case _:
            return ledger
    return ledger if found == known else replace(ledger, prepared=found)


def _named(
    known: Mapping[ContainerId, DriverDevice], listed: Iterable[DriverDevice]
) -> Mapping[ContainerId, DriverDevice]:
    """Return what is listed, by id. A sandbox stays known: after a restart nothing lists one without a container."""
    sandboxes = {id_: each.pod_id for id_, each in known.items()}
    return {each.id: replace(each, pod_id=each.pod_id or sandboxes.get(each.id, PodId(""))) for each in listed}


def _ended(device: DriverDevice, at: float) -> DriverDevice:
    since = at if device.unlisted_since is None else device.unlisted_since
    return replace(device, pod_id=PodId(""), unlisted_since=since)


def _settling(
    known: Mapping[ContainerId, DriverDevice], listed: Set[ContainerId], at: float
) -> Mapping[ContainerId, DriverDevice]:
    """Return what a list lacks, for SETTLED_S: a kubelet that has just started does not know its pods yet."""
    since = {id_: at if each.unlisted_since is None else each.unlisted_since for id_, each in known.items()}
    return {
        id_: replace(each, unlisted_since=since[id_])
        for id_, each in known.items()
        if id_ not in listed and at - since[id_] < SETTLED_S
    }


def with_prepared(ledger: Ledger, inventory: Inventory, monitors: Monitors) -> Ledger:
    """Hold the GPUs of prepared devices that no container of that pod and name can open yet, on the node as it is."""
    if not ledger.prepared and not any(each.device for each in ledger.external.values()):
        return ledger
    containers = {id_: each for id_, each in ledger.external.items() if not each.device}
    opened: defaultdict[tuple[str, str], frozenset[GpuUuid]] = defaultdict(frozenset)
    for other in containers.values():
        opened[other.pod, other.name] |= other.uuids
    found = {
        id_: _held(id_, each, uuids, monitors)
        for id_, each in ledger.prepared.items()
        if not (uuids := prepared_uuids(each.device, inventory)) <= opened[_pod(each), each.container_name]
    }
    return ledger.with_all_external({**containers, **found})


def _held(
    id_: ContainerId, prepared: DriverDevice, uuids: frozenset[GpuUuid], monitors: Monitors
) -> ExternalAllocation:
    pod, name = _pod(prepared), prepared.container_name
    # PodResources does not tell that a claim is for monitoring (adminAccess); policy names these pods.
    watched = uuids if monitors.pods.match(pod) else frozenset[GpuUuid]()
    return ExternalAllocation(id_, prepared.pod_id, pod, uuids, name=name, watched=watched, device=prepared.device)


def _pod(prepared: DriverDevice) -> str:
    return f"{prepared.namespace}/{prepared.pod_name}"
