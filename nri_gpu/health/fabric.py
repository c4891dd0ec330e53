"""GPUs that wait for their NVLink fabric, which is no fault of theirs: nobody gets them until it is ready."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.health_settings import HealthSettings, UnreadyFabric

# Short enough that a refusal shows it whole.
NOT_READY: Final = "NVLink is not ready: see the fabric manager; on NVL72 also IMEX and switch trays"


def waiting(inventory: Inventory, rules: HealthSettings) -> frozenset[GpuUuid]:
    """Return the GPUs that are withheld as long as they show the sign.

    A single GPU without a switch may work without a fabric: there `fatal_signs` and `suspect_signs` decide.
    """
    in_fabric = [gpu for gpu in inventory.gpus if gpu.fabric or Sign.FABRIC_NOT_READY in gpu.signs]
    if rules.fabric is UnreadyFabric.SIGNS or (len(in_fabric) == 1 and not inventory.nvswitches):
        return frozenset()
    return frozenset(gpu.uuid for gpu in in_fabric if Sign.FABRIC_NOT_READY in gpu.signs)


def judged_signs(gpu: Gpu, waiting: frozenset[GpuUuid]) -> tuple[Sign, ...]:
    """Return the signs that decide on a GPU's state of health."""
    return tuple(sign for sign in gpu.signs if not (sign is Sign.FABRIC_NOT_READY and gpu.uuid in waiting))


def withheld(gpu: Gpu, waiting: frozenset[GpuUuid]) -> Gpu:
    """Return the GPU with the reason why nobody gets it; its MIG devices share it."""
    return replace(gpu, unavailable=gpu.unavailable or NOT_READY) if gpu.uuid in waiting else gpu
