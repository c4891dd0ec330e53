"""The GPUs and MIG devices that new pods can have, by each way of asking for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit, is_compute_slice, whole
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy, mig_resource
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import PoolList
from nri_gpu.policy.select import is_opened


class Way(StrEnum):
    """A way to ask for GPUs. annotation: by the pod itself, also in its environment."""

    ANNOTATION = "annotation"
    KUBELET = "kubelet"
    DRA = "dra"


def offered_to(inventory: Inventory, policy: Policy) -> Mapping[GpuUuid, tuple[Way, ...]]:
    """Map each GPU and MIG device to the ways by which policy lets some new pod have it, whatever its health."""
    pools, dra = policy.pool, policy.dra
    of_kubelet = kubelet_offer(inventory, policy.kubelet, pools).resources if policy.kubelet.enabled else {}
    ways = {
        Way.ANNOTATION: {unit.uuid for unit in inventory.units if is_opened(policy, pools.of(unit))},
        Way.KUBELET: {unit.uuid for units in of_kubelet.values() for unit in units},
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


class KubeletOffer(Struct, frozen=True):
    """The GPUs and MIG devices that the device plugin offers."""

    resources: Mapping[str, tuple[Unit, ...]]  # in NVML's order; one without any is offered empty
    # MIG devices that are not offered, by the resource of their pool: the profiles' resources are another pool's.
    left_out: Mapping[str, tuple[MigPart, ...]]

    @property
    def fault(self) -> str:
        """Return which MIG devices are not offered, and what to do, or empty."""
        left = " and ".join(f"{counted(len(parts), 'MIG device')} of {name}" for name, parts in self.left_out.items())
        return left and (
            f"the kubelet is not offered {left}: a MIG profile's resource has no pool in its name, so of the resources "
            "with one prefix only one can have GPUs in MIG mode; put these into one pool, or change that prefix"
        )


def kubelet_offer(inventory: Inventory, settings: KubeletSettings, pools: PoolList) -> KubeletOffer:
    """Return what the device plugin offers. No two resources have one name, whatever is in MIG mode."""
    of_pool = {name: settings.resource_of(name) for name in ("", *(pool.name for pool in pools.pools))}
    of_resource: dict[str | None, list[Unit]] = {}
    for unit in inventory.gpus if settings.mig_strategy is MigStrategy.NONE else inventory.units:
        pool = pools.of(unit)
        of_resource.setdefault(of_pool[pool.name if pool else ""], []).append(unit)
    found: dict[str, tuple[Unit, ...]] = {}
    divided: dict[str, str] = {}  # prefix -> the resource whose pool has its MIG devices
    left_out: dict[str, tuple[MigPart, ...]] = {}
    for name in settings.names:
        units = of_resource.get(name, [])
        found[name + settings.suffix] = _of_one_name(units, settings.mig_strategy)
        parts = [unit for unit in units if isinstance(unit, MigPart) and is_allocatable(unit)]
        if not parts or settings.mig_strategy is not MigStrategy.MIXED:
            continue
        if divided.setdefault(name.partition("/")[0], name) != name:
            left_out[name] = tuple(parts)
            continue
        for profile in dict.fromkeys(part.device.profile for part in parts):
            alike = tuple(part for part in parts if part.device.profile == profile)
            found[mig_resource(name, profile) + settings.suffix] = alike
    return KubeletOffer(found, left_out)


def _of_one_name(units: Sequence[Unit], strategy: MigStrategy) -> tuple[Unit, ...]:
    """Return those of a resource's GPUs and MIG devices that are offered by its own name."""
    if strategy is MigStrategy.SINGLE and any(whole(unit).mig_enabled for unit in units):
        return tuple(unit for unit in units if isinstance(unit, MigPart)) if _are_alike(map(whole, units)) else ()
    undivided = (unit for unit in units if isinstance(unit, Gpu))
    return tuple(gpu for gpu in undivided if strategy is not MigStrategy.MIXED or is_allocatable(gpu))


def _are_alike(gpus: Iterable[Gpu]) -> bool:
    """Return whether MIG strategy `single` fits: each GPU is in MIG mode, no GPU is empty, and all have one profile."""
    among = {gpu.uuid: gpu for gpu in gpus}.values()
    return all(gpu.mig_enabled and gpu.mig for gpu in among) and len({d.profile for gpu in among for d in gpu.mig}) == 1
