"""External allocations: GPUs that another component assigned to a container, and what it may still ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import matches, why_not
from nri_gpu.domain.container import Container, DeviceNumber, PodId
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.edits import NO_EDITS, Edits, staged_below
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, whole
from nri_gpu.domain.gpu_request import Claim, Count, Everything, Mode
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.ledger.ledger import ExternalAllocation, Ledger, Live
from nri_gpu.policy.forms import NOTHING, Globs

NAMES_SHOWN: Final = 3
OTHERS: Final = "more GPUs than these, or other ones"
GPU_NODE: Final = re.compile(r"/dev/nvidia\d+")


class Monitors(Struct, frozen=True):
    """Pods that open GPUs and hold none but those that were granted, or the kubelet allocated, to them.

    pods: `namespace/name`, of the policy. allocated: what the kubelet did, by sandbox, as far as it has told.
    """

    pods: Globs = NOTHING
    allocated: Mapping[PodId, frozenset[GpuUuid]] = {}

    def watched(self, has: Live, opened: frozenset[GpuUuid]) -> frozenset[GpuUuid]:
        """Those of the GPUs that a container opens beyond its grant which it does not hold."""
        return opened - self.allocated.get(has.pod_id, frozenset()) if self.pods.match(has.pod) else frozenset()


NO_MONITORS: Final = Monitors()


def opened_uuids(numbers: Set[DeviceNumber], inventory: Inventory) -> frozenset[GpuUuid]:
    """GPUs and MIG devices that these device numbers open, whichever component assigned them.

    Of a GPU in MIG mode: the MIG devices whose capabilities are among the numbers, so that a device plugin's container
    blocks no other MIG device; all of them where there is no capability, since it cannot be told which.
    """
    majors = inventory.majors
    minors = {minor for major, minor in numbers if major == majors.nvidia}
    caps = {minor for major, minor in numbers if major == majors.nvidia_caps}
    found: set[GpuUuid] = set()
    for gpu in inventory.gpus:
        opened = gpu.minor_number in minors
        if opened:
            found.add(gpu.uuid)
        found.update(
            device.uuid for device in gpu.mig if (device.compute_instance_minor in caps) or (opened and not caps)
        )
    return frozenset(found)


def live(container: Container, edits: Edits = NO_EDITS, stage_dir: str = "") -> Live | None:
    """The devices that a container has, with those that these edits add; None where there are none.

    A privileged container lists every device of the host and holds none in particular.
    """
    numbers = frozenset[DeviceNumber]()
    if not container.privileged:
        numbers = _numbers(container) | {(each.major, each.minor) for each in edits.devices.values()}
    staged = container.staged
    if stage_dir:
        staged |= staged_below(stage_dir, [mount.source for mount in edits.mounts.values()])
    if not numbers and not staged:
        return None
    pod = f"{container.pod.namespace}/{container.pod.name}"
    return Live(container.id, container.name, container.pod.id, pod, numbers, staged)


def seen(ledger: Ledger, inventory: Inventory, monitors: Monitors = NO_MONITORS) -> Ledger:
    """The ledger with the external allocations of its containers, on the node as it is now."""
    found = (_beyond_grant(each, ledger, inventory, monitors) for each in ledger.live.values())
    return ledger.with_all_external({each.container_id: each for each in found if each})


def with_live(
    ledger: Ledger,
    container: Container,
    inventory: Inventory,
    monitors: Monitors,
    edits: Edits = NO_EDITS,
    stage_dir: str = "",
) -> Ledger:
    """The ledger with the devices of one more container, and with those that these edits add."""
    has = live(container, edits, stage_dir)
    if has is None:
        return ledger
    ledger = ledger.with_live(has)
    other = _beyond_grant(has, ledger, inventory, monitors)
    if other is None and has.container_id not in ledger.external:
        return ledger
    others = {id_: each for id_, each in ledger.external.items() if id_ != has.container_id}
    return ledger.with_all_external({**others, has.container_id: other} if other else others)


def _beyond_grant(has: Live, ledger: Ledger, inventory: Inventory, monitors: Monitors) -> ExternalAllocation | None:
    """What a container can open beyond its grant; not the GPU through whose node a granted MIG device is opened."""
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


def external_uuids(container: Container, node: Node) -> frozenset[GpuUuid]:
    """GPUs and MIG devices that a container about to be created can open."""
    return opened_uuids(_numbers(container), node.inventory)


def _numbers(container: Container) -> frozenset[DeviceNumber]:
    return container.opened | {(device.major, device.minor) for device in container.devices}


def external_units(container: Container, node: Node) -> tuple[Unit, ...]:
    """Those that programs can use, in NVML order: of a GPU in MIG mode, the MIG devices it has capabilities of."""
    majors = node.inventory.majors
    minors = {device.minor for device in container.devices if device.major == majors.nvidia}
    caps = {device.minor for device in container.devices if device.major == majors.nvidia_caps}
    found: list[Unit] = []
    for gpu in (gpu for gpu in node.gpus if gpu.minor_number in minors):
        parts = [part for part in gpu.parts if part.device.compute_instance_minor in caps]
        found += parts if gpu.mig_enabled else [gpu]
    return tuple(found)


def nvidia_nodes(container: Container, node: Node) -> str:
    """The GPU nodes it holds, by name."""
    uuids = external_uuids(container, node)
    return ", ".join(f"/dev/nvidia{gpu.minor_number}" for gpu in node.gpus if gpu.uuid in uuids)


def nvidia_names(container: Container) -> str:
    """The container's CDI devices of NVIDIA's vendors, by name."""
    named = [name for name in container.cdi_devices if is_nvidia_device(name)]
    return ", ".join(named[:NAMES_SHOWN]) + (", ..." if len(named) > NAMES_SHOWN else "")


def unknown_nodes(container: Container, node: Node) -> str:
    """GPU nodes that it holds and that are of no usable GPU known here, by name; empty where there are none."""
    majors = node.inventory.majors
    usable = {whole(unit).minor_number for unit in external_units(container, node)}
    odd = (
        device.path
        for device in container.devices
        if GPU_NODE.fullmatch(device.path) and not (device.major == majors.nvidia and device.minor in usable)
    )
    return ", ".join(dict.fromkeys(odd))


def beyond(claim: Claim, container: Container, held: tuple[Unit, ...], inventory: Inventory) -> str:
    """What a claim asks for beyond these GPUs of another component, as a clause; empty if it only shapes them."""
    if claim.extras.asked:  # extras come with a grant, and this is none
        return f"extras {', '.join(sorted(claim.extras.asked))}"
    if claim.mode is Mode.MPS:
        return "mode=mps, whose daemon is for GPUs that are granted here"
    if claim.mode is Mode.EXCLUSIVE:
        return "mode=exclusive, which cannot be guaranteed for GPUs that another component assigns"
    if isinstance(claim.wanted, Everything) and any(not why_not(gpu) and gpu not in held for gpu in inventory.gpus):
        return "all GPUs of this node"
    if isinstance(claim.wanted, Count):  # of what it holds, MIG devices too
        return "" if sum(matches(unit, claim.selectors) for unit in held) >= claim.wanted.gpus else OTHERS
    asker = Asker(container.pod.uid, Mode.SHARED)
    placed = place(claim, asker, only(held, inventory), Ledger())
    return OTHERS if isinstance(placed, Reason) else ""


def only(held: tuple[Unit, ...], inventory: Inventory) -> Inventory:
    """The inventory of a node that had nothing else."""
    gpus = {whole(unit).uuid: whole(unit) for unit in held}
    parts = {unit.uuid for unit in held if isinstance(unit, MigPart)}
    cut = (replace(gpu, mig=tuple(each for each in gpu.mig if each.uuid in parts)) for gpu in gpus.values())
    return replace(inventory, gpus=tuple(cut), faults=())


def completable(container: Container, node: Node) -> bool:
    """Whether it holds GPU nodes, and no other component brings the driver's files.

    CDI specifications and NVIDIA's hooks bring them; a privileged container holds no GPU in particular.
    """
    if container.privileged or nvidia_names(container) or container.nvidia_hooks:
        return False
    return bool(external_uuids(container, node)) or any(GPU_NODE.fullmatch(each.path) for each in container.devices)
