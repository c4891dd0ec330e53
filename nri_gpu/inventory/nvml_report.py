"""The NVML process's report, from JSON to an `Inventory`.

A driver's library is loaded into that process and could have overwritten its memory. So the report is checked again
here, type by type and bound by bound: a wrong number, or a name with a slash in it, must not get any further.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Annotated, Final

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

from nri_gpu.domain import bounds
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import WELL
from nri_gpu.domain.node import GpuFault, Inventory, Link
from nri_gpu.host.modules import MODULES

GPUS_MAX: Final = bounds.GPU_INDEX_MAX + 1
SHOWN_MAX: Final = 400  # characters of an error

Version = Annotated[str, bounds.VERSION.meta("")]
Symbol = Annotated[str, Meta(pattern=r"\Anvml[A-Za-z0-9_]{1,80}\Z")]
SymbolOrEmpty = Annotated[str, Meta(pattern=r"\A(?:nvml[A-Za-z0-9_]{1,80})?\Z")]


class _Report(Struct, kw_only=True):
    taken_at: float = 0.0  # filled in by the reader
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=GPUS_MAX)]
    faults: Annotated[tuple[GpuFault, ...], Meta(max_length=GPUS_MAX)]
    links: Annotated[tuple[Link, ...], Meta(max_length=GPUS_MAX**2 // 2)]
    driver_version: Version
    cuda_version: Version
    modules: dict[Annotated[str, bounds.one_of(MODULES)], Annotated[str, bounds.MODULE_VERSION.meta()]] = {}
    lacking: Annotated[tuple[tuple[Symbol, SymbolOrEmpty], ...], Meta(max_length=200)] = ()


class NvmlReport(Struct, frozen=True):
    """NVML's description of a node. lacking: functions that its library lacks, each with the one used instead."""

    inventory: Inventory
    lacking: tuple[str, ...]


def read_report(report: object, taken_at: float) -> NvmlReport:
    """Read a report. It has no majors and no capability minors: those are the kernel's. Raises: InventoryError."""
    try:
        read = convert(report, _Report)
        read.taken_at = taken_at
        _check_origin(read)
        inventory = _without_doubles(convert(read, Inventory, from_attributes=True))
        _check_consistency(inventory)
    except ValueError as error:  # msgspec's ValidationError is one
        raise InventoryError(f"the NVML process's report cannot be read: {error}"[:SHOWN_MAX]) from error
    lacking = tuple(f"{name} ({older} is used instead)" if older else name for name, older in read.lacking)
    return NvmlReport(inventory, lacking)


def _check_origin(report: _Report) -> None:
    """Refuse a text that is too long, and a fact that is not NVML's to tell. Raises: ValueError."""
    devices = [device for gpu in report.gpus for device in gpu.mig]
    texts = [text for gpu in report.gpus for text in (gpu.brand, gpu.unavailable)]
    texts += [*(device.unavailable for device in devices), *(fault.reason for fault in report.faults)]
    if any(len(text) > SHOWN_MAX for text in texts):
        raise ValueError(f"a text has more than {SHOWN_MAX} characters")
    health = {unit.health for unit in report.gpus} | {unit.health for unit in devices}
    minors = {minor for each in devices for minor in (each.gpu_instance_minor, each.compute_instance_minor)}
    if health - {WELL} or minors - {None}:
        raise ValueError("health and capability minors are none of NVML's facts")


def _without_doubles(inventory: Inventory) -> Inventory:
    """Turn GPUs that share a UUID, a minor or an address into faults, since nobody can tell them apart.

    A fault keeps a UUID or an address only if no other GPU or fault has it.
    """
    owners: dict[tuple[str, object], list[int]] = {}
    for gpu in inventory.gpus:
        uuids = (gpu.uuid, *(part.uuid for part in gpu.parts))
        names = (("minor", gpu.minor_number), ("bus id", gpu.pci_bus_id), *(("UUID", uuid) for uuid in uuids))
        for name in names:
            owners.setdefault(name, []).append(gpu.index)
    for fault in inventory.faults:
        for name in (("UUID", fault.uuid), ("bus id", fault.pci_bus_id)):
            if name in owners:
                owners[name].append(fault.index)
    shared = {name: found for name, found in owners.items() if len(found) > 1}
    why = {
        index: f"{what} {value} is reported {len(found)} times, of GPU {' and '.join(map(str, sorted(set(found))))}: "
        "they cannot be told apart, so none of them is granted"
        for (what, value), found in shared.items()
        for index in found
    }
    withheld = (gpu for gpu in inventory.gpus if gpu.index in why)
    faults = (
        *inventory.faults,
        *(GpuFault(gpu.index, why[gpu.index], uuid=gpu.uuid, pci_bus_id=gpu.pci_bus_id) for gpu in withheld),
    )
    uses = Counter(name for each in faults for name in (each.uuid, each.pci_bus_id))
    faults = tuple(
        replace(
            each,
            uuid=each.uuid if uses[each.uuid] == 1 else "",
            pci_bus_id=each.pci_bus_id if uses[each.pci_bus_id] == 1 else "",
        )
        for each in faults
    )
    return replace(
        inventory,
        gpus=tuple(gpu for gpu in inventory.gpus if gpu.index not in why),
        faults=tuple(sorted(faults, key=attrgetter("index"))),
        links=tuple(link for link in inventory.links if why.keys().isdisjoint((link.a, link.b))),
    )


def _check_consistency(inventory: Inventory) -> None:
    """Refuse two things with the same name or place, and a link that leads nowhere. Raises: ValueError."""
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
    for link in inventory.links:
        if link.a >= link.b:
            raise ValueError(f"a link from {link.a} to {link.b}")
        if {link.a, link.b} - set(indices):
            raise ValueError("a link leads to no GPU")
