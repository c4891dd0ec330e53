"""GPUs that a container holds by somebody else's hand, and what it may still ask for itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Final

from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.place import Asker, matches, place, why_not
from nri_gpu.domain.claim import Claim, Count, Everything, Mode
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, Inventory, MigPart, Node, Unit, whole

NVIDIA: Final = "nvidia.com"  # vendors of CDI devices end in it
NAMES_SHOWN: Final = 3
OTHERS: Final = "more GPUs than these, or other ones"
GPU_NODE: Final = re.compile(r"/dev/nvidia\d+")


def foreign_uuids(container: Container, node: Node) -> frozenset[GpuUuid]:
    """GPUs and MIG devices whose nodes a container holds, by whoever's hand.

    With the node of a GPU in MIG mode, those of its MIG devices whose capability nodes it holds too, so that a device
    plugin's container is in the way of nobody else; all of them where it holds none, since we cannot tell.
    """
    majors = node.inventory.majors
    minors = {device.minor for device in container.devices if device.major == majors.nvidia}
    held = [gpu for gpu in node.gpus if gpu.minor_number in minors]
    if not any(gpu.mig for gpu in held):
        return frozenset(gpu.uuid for gpu in held)
    caps = {device.minor for device in container.devices if device.major == majors.nvidia_caps}
    return frozenset(uuid for gpu in held for uuid in (gpu.uuid, *_held_parts(gpu, caps)))


def _held_parts(gpu: Gpu, caps: Set[int]) -> frozenset[GpuUuid]:
    known = frozenset(device.uuid for device in gpu.mig if device.compute_instance_minor in caps)
    return known or frozenset(device.uuid for device in gpu.mig)


def foreign_units(container: Container, node: Node) -> tuple[Unit, ...]:
    """What of it programs can use, in NVML order: of a GPU in MIG mode, those MIG devices whose rights it holds."""
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
    uuids = foreign_uuids(container, node)
    return ", ".join(f"/dev/nvidia{gpu.minor_number}" for gpu in node.gpus if gpu.uuid in uuids)


def nvidia_names(container: Container) -> str:
    """CDI names of NVIDIA's own, its device plugin's or its DRA drivers' devices.

    All their vendors end alike: `nvidia.com`, `k8s.device-plugin.nvidia.com`, `k8s.gpu.nvidia.com` and so on.
    """
    vendors = ((name, name.partition("/")[0]) for name in container.cdi_devices)
    named = [name for name, vendor in vendors if f".{vendor}".endswith(f".{NVIDIA}")]
    return ", ".join(named[:NAMES_SHOWN]) + (", ..." if len(named) > NAMES_SHOWN else "")


def unknown_nodes(container: Container, node: Node) -> str:
    """GPU nodes it holds of which we cannot tell whose they are, or use nothing: by name; empty when there are none."""
    majors = node.inventory.majors
    usable = {whole(unit).minor_number for unit in foreign_units(container, node)}
    odd = (
        device.path
        for device in container.devices
        if GPU_NODE.fullmatch(device.path) and not (device.major == majors.nvidia and device.minor in usable)
    )
    return ", ".join(dict.fromkeys(odd))


def beyond(claim: Claim, container: Container, held: tuple[Unit, ...], inventory: Inventory) -> str:
    """What a claim asks for that these GPUs, which others gave, are not; empty when it only shapes. A clause."""
    if claim.extras.asked:  # they come with a grant, and this is none
        return f"extras {', '.join(sorted(claim.extras.asked))}"
    if claim.mode is Mode.MPS:
        return "mode=mps, whose daemon is for GPUs that are granted here"
    if claim.mode is Mode.EXCLUSIVE:
        return "mode=exclusive, which nobody can promise for GPUs that others give out"
    if isinstance(claim.wanted, Everything) and any(not why_not(gpu) and gpu not in held for gpu in inventory.gpus):
        return "all GPUs of this node"
    if isinstance(claim.wanted, Count):  # of what it holds, MIG devices too
        return "" if sum(matches(unit, claim.selectors) for unit in held) >= claim.wanted.gpus else OTHERS
    asker = Asker(container.pod.uid, Mode.SHARED)
    placed = place(claim, asker, _only(held, inventory), Ledger())
    return OTHERS if isinstance(placed, Reason) else ""


def _only(held: tuple[Unit, ...], inventory: Inventory) -> Inventory:
    """The inventory of a node that had nothing else."""
    gpus = {whole(unit).uuid: whole(unit) for unit in held}
    parts = {unit.uuid for unit in held if isinstance(unit, MigPart)}
    cut = (replace(gpu, mig=tuple(each for each in gpu.mig if each.uuid in parts)) for gpu in gpus.values())
    return replace(inventory, gpus=tuple(cut), faults=())


def completable(container: Container, node: Node) -> bool:
    """Whether it holds GPU nodes, and nobody has brought, or will bring, the driver's files.

    CDI specifications and NVIDIA's hooks do; a privileged container holds no GPU in particular.
    """
    if container.privileged or nvidia_names(container) or container.nvidia_hooks:
        return False
    return bool(foreign_uuids(container, node)) or any(GPU_NODE.fullmatch(each.path) for each in container.devices)
