"""The GPUs that root took out of use, and the node's inventory with these marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import Cordon, Gpu, GpuUuid
from nri_gpu.domain.node import Inventory


class Cordons(Struct, frozen=True):
    """The GPUs that root took out of use.

    given: GPU or MIG device -> what has it from before, as in `Cordon`. unknown: nobody can tell which GPUs they are,
    so all of them count.
    """

    gpus: frozenset[GpuUuid] = frozenset()
    given: Mapping[GpuUuid, frozenset[str]] = {}
    unknown: bool = False


NO_CORDONS: Final = Cordons()


def marked(inventory: Inventory, cordons: Cordons) -> Inventory:
    """Return the inventory with these GPUs out of use, their MIG devices too, and all others in use."""
    if not (cordons.gpus or cordons.unknown or any(gpu.cordon for gpu in inventory.gpus)):
        return inventory
    return replace(inventory, gpus=tuple(_marked(gpu, cordons) for gpu in inventory.gpus))


def _marked(gpu: Gpu, cordons: Cordons) -> Gpu:
    def cordon(uuid: GpuUuid) -> Cordon | None:
        if not (cordons.unknown or gpu.uuid in cordons.gpus):
            return None
        return Cordon(cordons.given.get(uuid, frozenset()), cordons.unknown)

    mig = tuple(replace(device, cordon=cordon(device.uuid)) for device in gpu.mig)
    return replace(gpu, cordon=cordon(gpu.uuid), mig=mig)
