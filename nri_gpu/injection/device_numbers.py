"""The device numbers through which a node's GPUs can be used, and which GPU or MIG device each belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.bounds import DRIVER_GPUS_MAX
from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Capability, Gpu, GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.injection.device_nodes import draws, shared_nodes

CHANNELS_LOOKED_AT: Final = 8  # of a node's IMEX channels, of which there can be thousands


class Owner(Struct, frozen=True):
    """The owner of a device number."""

    path: str  # its usual node
    what: str = ""  # whose it is, in words: `GPU 2, GPU-...`; empty if it gives access to no GPU alone
    units: frozenset[GpuUuid] = frozenset()  # GPUs and MIG devices, one of which has to be granted
    shared: bool = False  # every container with a grant may have it


def unit_numbers(inventory: Inventory) -> list[tuple[DeviceNumber, GpuUuid]]:
    """Return in NVML order the number that opens each unit: a GPU's node, a MIG device's compute instance."""
    majors, found = inventory.majors, list[tuple[DeviceNumber, GpuUuid]]()
    for gpu in inventory.gpus:
        if majors.nvidia is not None:
            found.append(((majors.nvidia, gpu.minor_number), gpu.uuid))
        for device in gpu.mig:
            if majors.nvidia_caps is not None and device.compute_instance_minor is not None:
                found.append(((majors.nvidia_caps, device.compute_instance_minor), device.uuid))
    return found


def device_numbers(inventory: Inventory) -> Mapping[DeviceNumber, Owner]:
    """Return every number to look at, with its owner."""
    majors, found = inventory.majors, dict[DeviceNumber, Owner]()
    if majors.nvidia is not None:
        for minor in range(DRIVER_GPUS_MAX):  # even where no GPU has it
            found[majors.nvidia, minor] = Owner(f"/dev/nvidia{minor}", "a GPU that nri-gpu does not know")
    shared = [*shared_nodes(frozenset(Capability), majors)]
    for extra, each in inventory.extras.items():
        if extra is Extra.RDMA:
            continue  # adapters are not NVIDIA's GPUs, and other components give them to containers
        shared += each.nodes
        if channels := each.channels:
            for minor in range(min(channels.count, CHANNELS_LOOKED_AT)):
                path = f"/dev/nvidia-caps-imex-channels/channel{minor}"
                found[channels.major, minor] = Owner(path, shared=True)
    found.update({(node.major, node.minor): Owner(node.path, shared=True) for node in shared})
    for gpu in inventory.gpus:
        found.update(_of_gpu(gpu, inventory))
    return found


def _of_gpu(gpu: Gpu, inventory: Inventory) -> Iterator[tuple[DeviceNumber, Owner]]:
    """Yield the GPU's node, which its MIG devices share, the nodes it draws by, and its MIG devices' capabilities."""
    majors, name = inventory.majors, f"GPU {gpu.index}, {gpu.uuid}"
    if majors.nvidia is not None:
        units = frozenset({gpu.uuid, *(part.uuid for part in gpu.parts)})
        yield (majors.nvidia, gpu.minor_number), Owner(f"/dev/nvidia{gpu.minor_number}", name, units)
    drawing = frozenset({gpu.uuid, *(part.uuid for part in gpu.parts if draws(part))})
    for node in gpu.drm:
        yield (node.major, node.minor), Owner(f"/dev/dri/{node.name}", name, drawing)
    if majors.nvidia_caps is None:
        return
    for device in gpu.mig:
        beside = {each.uuid for each in gpu.mig if each.gpu_instance_minor == device.gpu_instance_minor}
        instance = f"MIG device {gpu.index}:{device.index}, {device.uuid}"
        for minor, what, uuids in (
            (device.gpu_instance_minor, f"a GPU instance of {name}", beside),
            (device.compute_instance_minor, instance, {device.uuid}),
        ):
            if minor is not None:
                path = f"/dev/nvidia-caps/nvidia-cap{minor}"
                yield (majors.nvidia_caps, minor), Owner(path, what, frozenset(uuids))
