"""GPUs that root took out of use: what had one before keeps it, and nothing new gets one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import Container
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice, Unit, described
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.holders import UNNAMED_POD, UNUSED, Usage
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.reservations import reservation_id, reserved_device
from nri_gpu.request.environment import VARIABLE

NOBODY: Final = frozenset({"", UNNAMED_POD})  # ids that stand for no pod in particular


def in_use_for(container: Container, inventory: Inventory) -> Inventory:
    """Return the inventory in which that counts as in use which the container's pod had before."""
    return in_use(inventory, *_before(container))


def first_out_of_use(units: Iterable[Unit], container: Container) -> Unit | None:
    """Return the first unit that is out of use for the container, or None."""
    before = _before(container)
    return next((unit for unit in units if described(unit).cordon and not _is_given(described(unit), *before)), None)


def in_use(inventory: Inventory, ids: Set[str], uuids: Collection[GpuUuid] = ()) -> Inventory:
    """Return the inventory in which units count as in use that these had before, and these units."""

    def seen(gpu: Gpu) -> Gpu:
        mig = tuple(replace(each, cordon=None) if _is_given(each, ids, uuids) else each for each in gpu.mig)
        return replace(gpu, cordon=None if _is_given(gpu, ids, uuids) else gpu.cordon, mig=mig)

    if not any(gpu.cordon for gpu in inventory.gpus):
        return inventory
    return replace(inventory, gpus=tuple(map(seen, inventory.gpus)))


def _before(container: Container) -> tuple[Set[str], Collection[GpuUuid]]:
    """Return the ids of a container's pod, and what was allocated to it before it went out of use.

    Neither the kubelet nor the scheduler allocates a GPU of ours that is out of use, so what they allocated to the
    container is from before. Of other components' allocations nobody knows that.
    """
    allocation = container.kubelet
    uuids = allocation.uuids if isinstance(allocation, Allocated) and allocation.key != VARIABLE else ()
    return {container.pod.uid, container.pod.id}, uuids


def _is_given(unit: Gpu | MigDevice, ids: Set[str], uuids: Collection[GpuUuid]) -> bool:
    """Return whether a unit is out of use and these had it before, or it is one of these units."""
    return unit.cordon is not None and (unit.uuid in uuids or not unit.cordon.given.isdisjoint(ids))


def is_kept(unit: Unit, device_id: str) -> bool:
    """Return whether a pod has a unit that is out of use from before, by that device of the kubelet."""
    cordon = described(unit).cordon
    return cordon is not None and device_id in cordon.given


def given_now(ledger: Ledger, uuid: GpuUuid) -> frozenset[str]:
    """Return what has a unit that is taken out of use now, as in `Cordon`."""
    use = ledger.usage().get(uuid, UNUSED)
    pods: set[str] = {each.pod_id for each in use.external.values()}
    pods |= {ledger.live[id_].pod_uid for id_ in use.external if id_ in ledger.live}
    if use.releasing:  # its container may be about to start again
        pods.add(use.releasing.pod_uid)
    return frozenset({*_granted(use), *_devices(ledger, uuid), *pods} - NOBODY)


def given_after(
    before: frozenset[str], ledger: Ledger, uuid: GpuUuid, recalled: Set[str] = frozenset()
) -> frozenset[str]:
    """Return what has a unit from before it was taken out of use, after the ledger changed.

    Nothing new gets it, so whatever has it by grant or claim is from before, also what the ledger learned since. Of the
    kubelet's devices only those stay that pods have. recalled: devices that the ledger does not know yet, as after a
    boot.
    """
    devices = _devices(ledger, uuid)
    gone = devices_among(before) - devices.keys() - recalled
    named = {id_ for id_, is_named in devices.items() if is_named}
    return frozenset({*before - gone, *_granted(ledger.usage().get(uuid, UNUSED)), *named} - NOBODY)


def devices_among(ids: Iterable[str]) -> frozenset[str]:
    """Return those of the ids that are devices of the kubelet."""
    return frozenset(id_ for id_ in ids if reserved_device(id_))


def _granted(use: Usage) -> Iterator[str]:
    yield from (each.pod_uid for each in use.holders)
    yield from use.claims


def _devices(ledger: Ledger, uuid: GpuUuid) -> Mapping[str, bool]:
    """Map the kubelet's devices by which pods have the unit to whether the sandbox of such a pod is known.

    A pod whose sandbox is gone is gone, or the kubelet makes it anew at once. Kubelets before 1.34 list pods that are
    over, too: these have no sandbox.
    """
    found = {
        reservation_id(device): bool(each.pod_id)
        for device, each in ledger.reservations.items()
        if device.uuid == uuid and not each.pod_gone
    }
    held = (
        each
        for entry in ledger.entries.values()
        if entry.holds and entry.allocation
        for each in entry.allocation.devices
    )
    return found | {reservation_id(each): True for each in held if each.uuid == uuid}
