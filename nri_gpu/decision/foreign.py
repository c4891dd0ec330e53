"""External allocations: GPUs that another component assigned to a container, and what it may still ask for."""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import matches, why_not
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, whole
from nri_gpu.domain.gpu_request import Claim, Count, Everything, Mode
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.injection.device_numbers import unit_numbers
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import numbers_of, opened_uuids

NAMES_SHOWN: Final = 3
OTHERS: Final = "more GPUs than these, or other ones"
GPU_NODE: Final = re.compile(r"/dev/nvidia\d+")


def external_uuids(container: Container, node: Node) -> frozenset[GpuUuid]:
    """GPUs and MIG devices that a container about to be created can open."""
    return opened_uuids(numbers_of(container), node.inventory)


def external_units(container: Container, node: Node) -> tuple[Unit, ...]:
    """Those that programs can use, in NVML order: of a GPU in MIG mode, the MIG devices it has capabilities of."""
    numbers = {(device.major, device.minor) for device in container.devices}
    opened = {uuid for number, uuid in unit_numbers(node.inventory) if number in numbers}
    return tuple(
        unit
        for unit in node.inventory.units
        if {unit.uuid, whole(unit).uuid} <= opened and whole(unit).mig_enabled is isinstance(unit, MigPart)
    )


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
