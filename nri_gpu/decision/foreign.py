"""External allocations: GPUs that another component assigned to a container, and what it may still ask for."""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import matches
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, gpus_of, whole
from nri_gpu.domain.gpu_request import Claim, Count, Everything, Mode
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.injection.device_numbers import unit_numbers
from nri_gpu.ledger.opened import numbers_of, opened_uuids

NAMES_SHOWN: Final = 3
OTHERS: Final = "more GPUs than these, or other ones"
GPU_NODE: Final = re.compile(r"/dev/nvidia\d+")


def external_uuids(container: Container, node: Node) -> frozenset[GpuUuid]:
    """Return the GPUs and MIG devices that a container about to be created can open."""
    return opened_uuids(numbers_of(container), node.inventory)


def external_units(container: Container, node: Node) -> tuple[Unit, ...]:
    """Return the opened units that programs can use, in NVML order.

    Of a GPU in MIG mode these are the MIG devices whose capabilities the container has.
    """
    numbers = {(device.major, device.minor) for device in container.devices}
    opened = {uuid for number, uuid in unit_numbers(node.inventory) if number in numbers}
    return tuple(
        unit
        for unit in node.inventory.units
        if {unit.uuid, whole(unit).uuid} <= opened and whole(unit).mig_enabled is isinstance(unit, MigPart)
    )


def nvidia_nodes(container: Container, node: Node) -> str:
    """Return the names of the GPU nodes that the container holds."""
    uuids = external_uuids(container, node)
    return ", ".join(f"/dev/nvidia{gpu.minor_number}" for gpu in node.gpus if gpu.uuid in uuids)


def nvidia_names(container: Container) -> str:
    """Return the names of the container's CDI devices of NVIDIA's vendors."""
    named = [name for name in container.cdi_devices if is_nvidia_device(name)]
    return ", ".join(named[:NAMES_SHOWN]) + (", ..." if len(named) > NAMES_SHOWN else "")


def unknown_nodes(container: Container, node: Node) -> str:
    """Return the names of the container's GPU nodes that belong to no usable GPU known here, or empty."""
    majors = node.inventory.majors
    usable = {gpu.minor_number for gpu in gpus_of(external_units(container, node))}
    odd = (
        device.path
        for device in container.devices
        if GPU_NODE.fullmatch(device.path) and not (device.major == majors.nvidia and device.minor in usable)
    )
    return ", ".join(dict.fromkeys(odd))


def beyond(claim: Claim, container: Container, held: tuple[Unit, ...], inventory: Inventory) -> str:
    """Return what a claim asks for beyond these GPUs of another component, as a clause, or empty."""
    if claim.extras.asked:  # extras come with a grant, and this is not a grant
        return f"extras {', '.join(sorted(claim.extras.asked))}"
    if claim.mode is Mode.MPS:
        return "mode=mps, whose daemon is for GPUs that are granted here"
    if claim.mode is Mode.EXCLUSIVE:
        return "mode=exclusive, which cannot be guaranteed for GPUs that another component assigns"
    if isinstance(claim.wanted, Everything):  # what it holds
        return "" if all(matches(unit, claim.selectors) for unit in held) else OTHERS
    if isinstance(claim.wanted, Count):  # counts what the container holds, MIG devices too
        return "" if sum(matches(unit, claim.selectors) for unit in held) >= claim.wanted.gpus else OTHERS
    asker = Asker(container.pod.uid, Mode.SHARED)
    placed = place(claim, asker, only(held, inventory), {})
    return OTHERS if isinstance(placed, Reason) else ""


def only(held: tuple[Unit, ...], inventory: Inventory) -> Inventory:
    """Return the inventory of a node that had nothing but these GPUs and MIG devices."""
    gpus = {gpu.uuid: gpu for gpu in gpus_of(held)}
    parts = {unit.uuid for unit in held if isinstance(unit, MigPart)}
    cut = (replace(gpu, mig=tuple(each for each in gpu.mig if each.uuid in parts)) for gpu in gpus.values())
    return replace(inventory, gpus=tuple(cut), faults=())


def completable(container: Container, node: Node) -> bool:
    """Return whether the container holds GPU nodes and no other component brings the driver's files.

    CDI specifications and NVIDIA's hooks bring them; a privileged container holds no GPU in particular.
    """
    if container.privileged or nvidia_names(container) or container.nvidia_hooks:
        return False
    return bool(external_uuids(container, node)) or any(GPU_NODE.fullmatch(each.path) for each in container.devices)
