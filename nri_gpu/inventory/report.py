"""The NVML process's report, from JSON to an `Inventory`.

A driver's library is loaded into that process and could have overwritten its memory. So the report is checked again
here, type by type and bound by bound: a wrong number, or a name with a slash in it, must not get any further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta, Struct, convert

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import MIG_PROFILE, ComputeMode, FabricState
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory import formats
from nri_gpu.system.kernel_modules import MODULES

GPUS_MAX: Final = formats.GPU_INDEX_MAX + 1
SHOWN_MAX: Final = 400  # characters of an error


def _pattern(pattern: re.Pattern[str], *others: str) -> Meta:
    """A text that matches as a whole, or is one of the others."""
    choices = "|".join([f"(?:{pattern.pattern})", *map(re.escape, others)])
    return Meta(pattern=rf"\A(?:{choices})\Z")


def _one_of(words: Iterable[str]) -> Meta:
    return Meta(pattern=rf"\A(?:{'|'.join(map(re.escape, words))})\Z")


GpuIndex = Annotated[int, Meta(ge=0, le=formats.GPU_INDEX_MAX)]
MigIndex = Annotated[int, Meta(ge=0, le=1023)]  # far more than a GPU has instances
DeviceNumber = Annotated[int, Meta(ge=0, le=formats.DEVICE_MINOR_MAX)]
Uint = Annotated[int, Meta(ge=0, le=formats.UINT_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=formats.BYTES_MAX)]
Processes = Annotated[int, Meta(ge=0, le=formats.PROCESSES_MAX)] | None
ArchNumber = Annotated[int, Meta(ge=0, le=99)]
Text = Annotated[str, Meta(max_length=400)]
Uuid = Annotated[str, _pattern(formats.UUID)]
BusId = Annotated[str, _pattern(formats.BUS_ID)]
VersionText = Annotated[str, _pattern(formats.VERSION, "")]
Symbol = Annotated[str, Meta(pattern=r"\Anvml[A-Za-z0-9_]{1,80}\Z")]
SymbolOrEmpty = Annotated[str, Meta(pattern=r"\A(?:nvml[A-Za-z0-9_]{1,80})?\Z")]
ModuleName = Annotated[str, _one_of(MODULES)]


class _Drm(Struct, array_like=True):
    name: Annotated[str, _pattern(formats.DRM_NAME)]
    major: DeviceNumber
    minor: DeviceNumber


class _Ecc(Struct, array_like=True):
    current: bool
    pending: bool


class _Fabric(Struct):
    state: FabricState
    status: Uint
    cluster: Annotated[str, _pattern(formats.CLUSTER_UUID, "")]
    clique: Uint
    health_mask: Uint | None


class _Mig(Struct):
    """Without its capability minors, which the kernel shows."""

    index: MigIndex
    uuid: Annotated[str, _pattern(formats.MIG_UUID)]
    gpu_instance_id: MigIndex
    compute_instance_id: MigIndex
    profile: Annotated[str, _pattern(MIG_PROFILE, formats.UNKNOWN_PROFILE)]
    memory_bytes: Bytes
    unavailable: Text
    processes: Processes


class _Gpu(Struct):
    index: GpuIndex
    minor_number: GpuIndex
    uuid: Uuid
    pci_bus_id: BusId
    model: Annotated[str, _pattern(formats.MODEL)]
    memory_bytes: Bytes
    arch: tuple[ArchNumber, ArchNumber]
    numa_node: Annotated[int, Meta(ge=0, le=formats.NUMA_NODE_MAX)] | None
    mig_enabled: bool
    brand: Text
    unavailable: Text
    mig: Annotated[tuple[_Mig, ...], Meta(max_length=1024)]
    drm: Annotated[tuple[_Drm, ...], Meta(max_length=64)]
    processes: Processes
    signs: Annotated[tuple[Sign, ...], Meta(max_length=len(Sign))]
    architecture: Annotated[str, _one_of(("", *formats.ARCHITECTURES.values()))] = ""
    cpus: Annotated[str, _pattern(formats.CPULIST, ""), Meta(max_length=formats.CPULIST_MAX)] = ""
    compute_mode: ComputeMode | None = None
    persistence: bool | None = None
    ecc: _Ecc | None = None
    addressing: Annotated[str, _one_of(("", *formats.ADDRESSING))] = ""
    fabric: _Fabric | None = None


class _Fault(Struct):
    index: GpuIndex
    reason: Text
    code: Annotated[int, Meta(ge=0, le=formats.NVML_CODE_MAX)]
    sign: Sign | None
    uuid: Annotated[str, _pattern(formats.UUID, "")]
    pci_bus_id: Annotated[str, _pattern(formats.BUS_ID, "")]


class _Link(Struct):
    a: GpuIndex
    b: GpuIndex
    pcie: Annotated[str, _one_of(formats.PCIE_PATHS)]
    nvlink: Annotated[int, Meta(ge=0, le=formats.NVLINKS_MAX)]

    def __post_init__(self) -> None:
        if self.a >= self.b:
            raise ValueError(f"a link from {self.a} to {self.b}")


class _Report(Struct, kw_only=True):
    taken_at: float = 0.0  # filled in by the reader
    gpus: Annotated[tuple[_Gpu, ...], Meta(max_length=GPUS_MAX)]
    faults: Annotated[tuple[_Fault, ...], Meta(max_length=GPUS_MAX)]
    links: Annotated[tuple[_Link, ...], Meta(max_length=GPUS_MAX**2 // 2)]
    driver_version: VersionText
    cuda_version: VersionText
    modules: dict[ModuleName, Annotated[str, _pattern(formats.MODULE_VERSION)]] = {}
    lacking: Annotated[tuple[tuple[Symbol, SymbolOrEmpty], ...], Meta(max_length=200)] = ()


class NvmlReport(Struct, frozen=True):
    """What NVML says of a node. lacking: functions that its library lacks, each with the one used instead, if any."""

    inventory: Inventory
    lacking: tuple[str, ...]


def read_report(report: object, taken_at: float) -> NvmlReport:
    """Reads a report. It has no majors and no capability minors: those are the kernel's. Raises: InventoryError."""
    try:
        read = convert(report, _Report)
        read.taken_at = taken_at
        inventory = convert(read, Inventory, from_attributes=True)
        _check_consistency(inventory)
    except ValueError as error:  # msgspec's ValidationError is one
        raise InventoryError(f"the NVML process's report cannot be read: {error}"[:SHOWN_MAX]) from error
    lacking = tuple(f"{name} ({older} is used instead)" if older else name for name, older in read.lacking)
    return NvmlReport(inventory, lacking)


def _check_consistency(inventory: Inventory) -> None:
    """Raises: ValueError: two things have the same name or place, or a link leads nowhere."""
    gpus, parts, faults = inventory.gpus, inventory.parts, inventory.faults
    indices = [gpu.index for gpu in gpus]
    for what, values in (
        ("UUID", [*(unit.uuid for unit in inventory.units), *(fault.uuid for fault in faults if fault.uuid)]),
        ("index", [*indices, *(fault.index for fault in faults)]),
        ("minor", [gpu.minor_number for gpu in gpus]),
        ("bus id", [*(gpu.pci_bus_id for gpu in gpus), *(fault.pci_bus_id for fault in faults if fault.pci_bus_id)]),
        ("MIG index", [part.place for part in parts]),
        (
            "MIG instance",
            [(part.gpu.index, part.device.gpu_instance_id, part.device.compute_instance_id) for part in parts],
        ),
        ("link", [(link.a, link.b) for link in inventory.links]),
    ):
        if len(set(values)) != len(values):
            raise ValueError(f"a {what} occurs twice")
    if any({link.a, link.b} - set(indices) for link in inventory.links):
        raise ValueError("a link leads to no GPU")
