"""The NVML process's report, from JSON to an `Inventory`.

A driver's library has written into that process what it liked, so what it says is checked again here: a number that is
none, or a name with a slash in it, must not get any farther.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, Final

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import ComputeMode, DrmNode, Ecc, Fabric, FabricState, Gpu, MigDevice
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import GpuFault, Inventory, Link
from nri_gpu.inventory.facts import ADDRESSING, ARCHITECTURES, MODULES
from nri_gpu.inventory.identity import (
    parse_bus_id,
    parse_cluster,
    parse_drm_name,
    parse_mig_uuid,
    parse_model,
    parse_module_version,
    parse_profile,
    parse_uuid,
    parse_version,
)
from nri_gpu.inventory.kernel import CPULIST_MAX, parse_cpulist

GPU_MAX: Final = 247  # /dev/nvidia0 to 247; 255 is nvidiactl (kernel-open/common/inc/nv-chardev-numbers.h)
MIG_MAX: Final = 1023  # far more than a GPU has instances
DEVICE_MAX: Final = 2**20 - 1  # linux/kdev_t.h, of minors; majors have less
UINT_MAX: Final = 2**32 - 1  # of NVML's numbers
NUMA_MAX: Final = 1023  # MAX_NUMNODES
NVLINK_MAX: Final = 36  # NVML_NVLINK_MAX_LINKS
ARCH_MAX: Final = 99
BYTES_MAX: Final = 2**63 - 1
PROCESSES_MAX: Final = 2**22  # of a whole machine (Linux: PID_MAX_LIMIT)
CODE_MAX: Final = 999  # NVML_ERROR_UNKNOWN
TEXT_MAX: Final = 400  # characters of a sentence
UNKNOWN: Final = "unknown"  # a profile that could not be asked for
SYMBOLS_MAX: Final = 200  # more than we ask for
SYMBOL: Final = re.compile(r"nvml[A-Za-z0-9_]{1,80}")
PCIE_WORDS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")


def inventory_from_report(report: Any, taken_at: float) -> Inventory:  # noqa: ANN401 (straight out of json)
    """Reads a report. Majors are not NVML's to tell.

    Raises: InventoryError.
    """
    try:
        inventory = Inventory(
            taken_at=taken_at,
            gpus=tuple(_gpu(facts) for facts in report["gpus"]),
            faults=tuple(_gpu_fault(each) for each in report["faults"]),
            links=tuple(_link(link) for link in report["links"]),
            driver_version=parse_version(_text(report["driver_version"])),
            cuda_version=parse_version(_text(report["cuda_version"])),
            modules=_modules(report.get("modules", {})),
        )
        _consistent(inventory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InventoryError(f"the NVML process's report cannot be read: {error!r}"[:TEXT_MAX]) from error
    return inventory


def lacking_in(report: Any) -> tuple[str, ...]:  # noqa: ANN401 (straight out of json)
    """Symbols that the library does not have, each with what stands in for it, if anything does.

    Raises: InventoryError.
    """
    try:
        _number(len(report["lacking"]), SYMBOLS_MAX)
        pairs = [(_symbol(lacking), instead and _symbol(instead)) for lacking, instead in report["lacking"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InventoryError(f"the NVML process's report cannot be read: {error!r}"[:TEXT_MAX]) from error
    return tuple(f"{lacking} (in its place {instead})" if instead else lacking for lacking, instead in pairs)


def _symbol(value: object) -> str:
    """Raises: TypeError, ValueError."""
    if not SYMBOL.fullmatch(text := _text(value)):
        raise ValueError(f"{text!r:.40} is not a function of NVML's")
    return text


def _consistent(inventory: Inventory) -> None:
    """Raises: ValueError: two of them are one, or a link leads nowhere."""
    gpus, parts, faults = inventory.gpus, inventory.parts, inventory.faults
    indices = [gpu.index for gpu in gpus]
    for what, values in (
        ("UUID", [*(unit.uuid for unit in inventory.units), *(each.uuid for each in faults if each.uuid)]),
        ("index", [*indices, *(fault.index for fault in faults)]),
        ("minor", [gpu.minor_number for gpu in gpus]),
        ("bus id", [*(gpu.pci_bus_id for gpu in gpus), *(each.pci_bus_id for each in faults if each.pci_bus_id)]),
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


def _number(value: object, most: int) -> int:
    """Raises: ValueError."""
    if type(value) is not int or not 0 <= value <= most:  # a bool is an int to isinstance
        raise ValueError(f"{value!r:.40} is not a number from 0 to {most}")
    return value


def _text(value: object, most: int = TEXT_MAX) -> str:
    """Raises: TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value[:most]


def _one_of(value: object, words: Container[str]) -> str:
    """Raises: TypeError, ValueError."""
    text = _text(value)
    if text not in words:
        raise ValueError(f"{text!r:.40} is not one of {words}")
    return text


def _gpu(facts: Any) -> Gpu:  # noqa: ANN401
    major, minor = facts["arch"]
    numa_node = facts["numa_node"]
    return Gpu(
        index=_number(facts["index"], GPU_MAX),
        minor_number=_number(facts["minor_number"], GPU_MAX),
        uuid=parse_uuid(_text(facts["uuid"])),
        pci_bus_id=parse_bus_id(_text(facts["pci_bus_id"])),
        model=parse_model(_text(facts["model"])),
        memory_bytes=_number(facts["memory_bytes"], BYTES_MAX),
        arch=(_number(major, ARCH_MAX), _number(minor, ARCH_MAX)),
        numa_node=None if numa_node is None else _number(numa_node, NUMA_MAX),
        mig_enabled=facts["mig_enabled"] is True,
        brand=_text(facts["brand"]),
        unavailable=_text(facts["unavailable"]),
        mig=tuple(_mig_device(device) for device in facts["mig"]),
        drm=tuple(
            DrmNode(parse_drm_name(_text(name)), _number(major, DEVICE_MAX), _number(minor, DEVICE_MAX))
            for name, major, minor in facts["drm"]
        ),
        processes=_count(facts["processes"]),
        signs=tuple(Sign(_text(each)) for each in facts["signs"]),
        **_facts(facts),
    )


def _facts(facts: Any) -> dict[str, Any]:  # noqa: ANN401
    """How it is set up: each may be missing."""
    cpus, mode = _text(facts.get("cpus", ""), CPULIST_MAX + 1), facts.get("compute_mode")
    return {
        "architecture": _one_of(facts.get("architecture", ""), ("", *ARCHITECTURES.values())),
        "cpus": parse_cpulist(cpus) if cpus else "",
        "compute_mode": None if mode is None else ComputeMode(_text(mode)),
        "persistence": _flag(facts.get("persistence")),
        "ecc": _ecc(facts.get("ecc")),
        "addressing": _one_of(facts.get("addressing", ""), ("", *ADDRESSING)),
        "fabric": _fabric(facts.get("fabric")),
    }


def _modules(found: Any) -> dict[str, str]:  # noqa: ANN401
    """Raises: TypeError, ValueError."""
    if not isinstance(found, dict):
        raise TypeError(f"{found!r:.40} is not an object")
    return {_one_of(name, MODULES): parse_module_version(_text(version)) for name, version in found.items()}


def _flag(found: Any) -> bool | None:  # noqa: ANN401
    if found is not None and not isinstance(found, bool):
        raise TypeError(f"{found!r:.40} is neither true nor false")
    return found


def _ecc(found: Any) -> Ecc | None:  # noqa: ANN401
    if found is None:
        return None
    current, pending = found
    return Ecc(_flag(current) is True, _flag(pending) is True)


def _fabric(found: Any) -> Fabric | None:  # noqa: ANN401
    if found is None:
        return None
    mask = found["health_mask"]
    return Fabric(
        state=FabricState(_text(found["state"])),
        status=_number(found["status"], UINT_MAX),
        cluster=parse_cluster(_text(found["cluster"])),
        clique=_number(found["clique"], UINT_MAX),
        health_mask=None if mask is None else _number(mask, UINT_MAX),
    )


def _gpu_fault(facts: Any) -> GpuFault:  # noqa: ANN401
    sign, uuid, bus_id = facts["sign"], _text(facts["uuid"]), _text(facts["pci_bus_id"])
    return GpuFault(
        index=_number(facts["index"], GPU_MAX),
        reason=_text(facts["reason"]),
        code=_number(facts["code"], CODE_MAX),
        sign=None if sign is None else Sign(_text(sign)),
        uuid=parse_uuid(uuid) if uuid else "",
        pci_bus_id=parse_bus_id(bus_id) if bus_id else "",
    )


def _mig_device(facts: Any) -> MigDevice:  # noqa: ANN401
    """Without its minors: they are the kernel's to tell."""
    profile = _text(facts["profile"])
    return MigDevice(
        index=_number(facts["index"], MIG_MAX),
        uuid=parse_mig_uuid(_text(facts["uuid"])),
        gpu_instance_id=_number(facts["gpu_instance_id"], MIG_MAX),
        compute_instance_id=_number(facts["compute_instance_id"], MIG_MAX),
        profile=profile if profile == UNKNOWN else parse_profile(profile),
        memory_bytes=_number(facts["memory_bytes"], BYTES_MAX),
        unavailable=_text(facts["unavailable"]),
        processes=_count(facts["processes"]),
    )


def _count(found: Any) -> int | None:  # noqa: ANN401
    return None if found is None else _number(found, PROCESSES_MAX)


def _link(link: Any) -> Link:  # noqa: ANN401
    a, b = _number(link["a"], GPU_MAX), _number(link["b"], GPU_MAX)
    if a >= b:
        raise ValueError(f"a link from {a} to {b}")
    return Link(a=a, b=b, pcie=_one_of(link["pcie"], PCIE_WORDS), nvlink=_number(link["nvlink"], NVLINK_MAX))
