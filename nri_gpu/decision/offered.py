"""The GPUs and MIG devices that new pods can have, by each way of asking for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit, is_compute_slice
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import PoolList
from nri_gpu.policy.select import is_opened

SHARED: Final = ".shared"


class Way(StrEnum):
    """A way to ask for GPUs. annotation: by the pod itself, also in its environment."""

    ANNOTATION = "annotation"
    KUBELET = "kubelet"
    DRA = "dra"


def offered_to(inventory: Inventory, policy: Policy) -> Mapping[GpuUuid, tuple[Way, ...]]:
    """Map each GPU and MIG device to the ways by which policy lets some new pod have it, whatever its health."""
    pools, dra = policy.pool, policy.dra
    counted = kubelet_resources(inventory, policy.kubelet, pools) if policy.kubelet.enabled else {}
    ways = {
        Way.ANNOTATION: {unit.uuid for unit in inventory.units if is_opened(policy, pools.of(unit))},
        Way.KUBELET: {unit.uuid for units in counted.values() for unit in units},
        Way.DRA: {
            unit.uuid
            for unit in inventory.units
            if dra.enabled and is_allocatable(unit) and pools.offers(unit, dra.pool)
        },
    }
    return {unit.uuid: tuple(way for way, uuids in ways.items() if unit.uuid in uuids) for unit in inventory.units}


def is_allocatable(unit: Unit) -> bool:
    """Return whether the unit can be allocated in one piece: an undivided GPU, or a MIG device that is none's slice."""
    if isinstance(unit, MigPart):
        return unit.gpu.mig_enabled and not is_compute_slice(unit.device.profile)
    return not unit.mig_enabled


def kubelet_resources(
    inventory: Inventory, settings: KubeletSettings, pools: PoolList
) -> Mapping[str, tuple[Unit, ...]]:
    """Map each resource of the device plugin to its GPUs and MIG devices, in NVML's order."""
    suffix = SHARED if settings.replicas > 1 and settings.rename else ""
    main = settings.resource + suffix
    gpus, strategy = inventory.gpus, settings.mig_strategy
    found: dict[str, list[Unit]] = {main: []}
    if strategy is MigStrategy.MIXED:
        found[main] += [gpu for gpu in gpus if is_allocatable(gpu)]
        for part in filter(is_allocatable, inventory.parts):
            found.setdefault(_mig_resource(main, part.device.profile) + suffix, []).append(part)
    elif strategy is MigStrategy.SINGLE and any(gpu.mig_enabled for gpu in gpus):
        found[main] += inventory.parts if _are_alike(gpus) else ()
    else:
        found[main] += gpus
    return {name: tuple(unit for unit in units if pools.offers(unit, settings.pool)) for name, units in found.items()}


def _mig_resource(resource: str, profile: str) -> str:
    """Name a profile's resource, as `nvidia.com/mig-1g.10gb.me`: a resource's name may hold no `+`."""
    return f"{resource.partition('/')[0]}/mig-{profile.replace('+', '.')}"


def _are_alike(gpus: Sequence[Gpu]) -> bool:
    """Return whether MIG strategy `single` fits: each GPU is in MIG mode, no GPU is empty, and all have one profile."""
    return all(gpu.mig_enabled and gpu.mig for gpu in gpus) and len({d.profile for gpu in gpus for d in gpu.mig}) == 1
