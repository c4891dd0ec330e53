"""The GPUs that a container can open by the numbers of its devices, whatever it was granted."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container, DeviceNumber, PodId
from nri_gpu.domain.edits import NO_EDITS, Edits, staged_below
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.injection.device_numbers import unit_numbers
from nri_gpu.ledger.holders import ExternalAllocation
from nri_gpu.ledger.ledger import Ledger, Live
from nri_gpu.policy.forms import NOTHING, Globs


class Monitors(Struct, frozen=True):
    """Pods that open GPUs and hold none but those that were granted, or the kubelet allocated, to them.

    pods: `namespace/name`, of the policy. allocated: what the kubelet did, by sandbox, as far as it has told.
    """

    pods: Globs = NOTHING
    allocated: Mapping[PodId, frozenset[GpuUuid]] = {}

    def watched(self, has: Live, opened: frozenset[GpuUuid]) -> frozenset[GpuUuid]:
        """Return the GPUs that a container opens beyond its grant and does not hold."""
        return opened - self.allocated.get(has.pod_id, frozenset()) if self.pods.match(has.pod) else frozenset()


NO_MONITORS: Final = Monitors()


def opened_uuids(numbers: Set[DeviceNumber], inventory: Inventory) -> frozenset[GpuUuid]:
    """Find the GPUs and MIG devices that these device numbers open, whichever component assigned them.

    Of a GPU in MIG mode: the MIG devices whose capabilities are among the numbers, so that a device plugin's container
    blocks no other MIG device; all of them where there is no capability, since it cannot be told which.
    """
    found = {uuid for number, uuid in unit_numbers(inventory) if number in numbers}
    if all(major != inventory.majors.nvidia_caps for major, _ in numbers):
        found |= {device.uuid for gpu in inventory.gpus if gpu.uuid in found for device in gpu.mig}
    return frozenset(found)


def live(container: Container, edits: Edits = NO_EDITS, stage_dir: str = "") -> Live | None:
    """Return the devices that a container has, with those that these edits add; None where there are none.

    A privileged container lists every device of the host and holds none in particular.
    """
    numbers = frozenset[DeviceNumber]()
    if not container.privileged:
        numbers = numbers_of(container) | {(each.major, each.minor) for each in edits.devices.values()}
    staged = container.staged
    if stage_dir:
        staged |= staged_below(stage_dir, [mount.source for mount in edits.mounts.values()])
    if not numbers and not staged:
        return None
    pod = container.pod
    return Live(container.id, container.name, pod.id, pod.full_name, numbers, staged, pod_uid=pod.uid)


def seen(ledger: Ledger, inventory: Inventory, monitors: Monitors = NO_MONITORS) -> Ledger:
    """Read what all containers of a ledger open anew, on the node as it is now."""
    found = (_beyond_grant(each, ledger, inventory, monitors) for each in ledger.live.values())
    return ledger.with_all_external({each.container_id: each for each in found if each})


def seen_one(ledger: Ledger, has: Live, inventory: Inventory, monitors: Monitors = NO_MONITORS) -> Ledger:
    """Read anew what one container of a ledger opens."""
    other = _beyond_grant(has, ledger, inventory, monitors)
    if other is None and has.container_id not in ledger.external:
        return ledger
    others = {id_: each for id_, each in ledger.external.items() if id_ != has.container_id}
    return ledger.with_all_external({**others, has.container_id: other} if other else others)


def _beyond_grant(has: Live, ledger: Ledger, inventory: Inventory, monitors: Monitors) -> ExternalAllocation | None:
    """Find what a container can open beyond its grant, but for the GPU whose node a granted MIG device needs."""
    entry, before = ledger.entries.get(has.container_id), ledger.external.get(has.container_id)
    opened = opened_uuids(has.numbers, inventory)
    granted = frozenset(entry.grant.uuids) if entry else frozenset()
    if not granted.issuperset(opened):
        granted |= {gpu.uuid for gpu in inventory.gpus if any(part.uuid in granted for part in gpu.mig)}
    uuids = opened - granted
    if not uuids:
        return None
    watched = monitors.watched(has, uuids)
    regained = (before.watched | before.regained) & (uuids - watched) if before else frozenset[GpuUuid]()
    shifted = has.container if granted else ""
    return ExternalAllocation(has.container_id, has.pod_id, has.pod, uuids, shifted, has.container, watched, regained)


def numbers_of(container: Container) -> frozenset[DeviceNumber]:
    """Return the devices that a container has, or may open by a rule of its own."""
    return container.opened | {(device.major, device.minor) for device in container.devices}
