"""`[[pool]]`: GPUs set apart for some. A GPU belongs to the first pool whose selectors all fit it, or to none."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final

from msgspec import Struct

from nri_gpu.domain.gpu import MIG_PROFILE, GpuUuid, MigPart, Unit, whole
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.forms import NAMESPACES, SIZE, Globs, PoolName, about, limit, pattern_or_more, text, unique

POOLS_MAX: Final = 64
SELECTORS: Final = ("device", "model", "memory_at_least", "memory_at_most", "mig")
_HEX: Final = "[0-9a-f]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_Device = Annotated[
    str,
    text(
        rf"(?:0|[1-9][0-9]{{0,2}})(?::(?:0|[1-9][0-9]?))?|(?:GPU|MIG)-{_UUID}|{_HEX}{{4}}:{_HEX}{{2}}:{_HEX}{{2}}\.{_HEX}",
        "an index (0), a MIG device's (0:1), a whole UUID in lower case (GPU-8f3a...) or a PCI bus id (0000:3b:00.0)",
        64,
    ),
]
_MODEL: Final = pattern_or_more(Annotated[str, text(r"[ -~]+", "a pattern of printable ASCII", 96)])
_Profile = Annotated[str, text(MIG_PROFILE.pattern, "a MIG profile such as 1g.10gb", 40)]


class Pool(Struct, frozen=True, kw_only=True):
    """GPUs set apart: those that fit every selector given. Other containers are not offered them."""

    name: Annotated[PoolName, about("What rules and sentences call this pool.")]
    device: Annotated[
        tuple[_Device, ...] | None,
        unique(256),
        about("GPUs, with their MIG devices, or MIG devices: index, UUID or PCI bus id."),
    ] = None
    model: Annotated[Globs | None, _MODEL, about("Patterns of the model's name; case does not matter.")] = None
    memory_at_least: Annotated[int | None, SIZE, about('Memory of the GPU or MIG device: "40Gi".')] = None
    memory_at_most: Annotated[int | None, SIZE, about('Memory of the GPU or MIG device: "40Gi".')] = None
    mig: Annotated[tuple[_Profile, ...] | None, unique(64), about("Profiles of MIG devices; no whole GPU has one.")] = (
        None
    )
    namespaces: Annotated[
        Globs | None,
        NAMESPACES,
        about("Patterns of namespaces whose containers may have them, in addition to rules that name the pool."),
    ] = None
    containers_per_gpu: Annotated[
        int | None, limit(minimum=1), about("Containers that may share one of them, whatever limits say.")
    ] = None

    def has(self, unit: Unit) -> bool:
        """Whether a GPU or a MIG device fits."""
        return (
            (self.device is None or not _called(unit).isdisjoint(self.device))
            and (self.model is None or _matches_model(self.model, unit.model))
            and (self.memory_at_least is None or unit.memory_bytes >= self.memory_at_least)
            and (self.memory_at_most is None or unit.memory_bytes <= self.memory_at_most)
            and (self.mig is None or (isinstance(unit, MigPart) and unit.device.profile in self.mig))
        )


class PoolList(Struct, frozen=True):
    """All pools, in the operator's order."""

    pools: tuple[Pool, ...] = ()

    def members(self, inventory: Inventory) -> Mapping[GpuUuid, Pool]:
        """Which pool each GPU and MIG device is in; those in none are absent."""
        found = ((unit.uuid, next((pool for pool in self.pools if pool.has(unit)), None)) for unit in inventory.units)
        return {uuid: pool for uuid, pool in found if pool is not None}


NO_POOLS: Final = PoolList()


def _matches_model(model: Globs, name: str) -> bool:
    """Whether a model's name matches, in any case."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in model.patterns)


def _called(unit: Unit) -> frozenset[str]:
    """Everything by which a `device` list can mean it; a MIG device also by what its GPU is called."""
    gpu = whole(unit)
    of_gpu = frozenset({str(gpu.index), gpu.uuid, gpu.pci_bus_id})
    return of_gpu | {unit.uuid, unit.place} if isinstance(unit, MigPart) else of_gpu
