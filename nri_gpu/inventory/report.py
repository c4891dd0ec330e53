"""The NVML process's report, from JSON to an `Inventory`."""

from __future__ import annotations

from typing import Any

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import DrmNode, Gpu, GpuFault, GpuUuid, Inventory, Link, MigDevice, PciBusId


def inventory_from_report(report: Any, taken_at: float) -> Inventory:  # noqa: ANN401 (straight out of json)
    """Reshapes a report; its texts were checked where they were asked for. Majors are not NVML's to tell.

    Raises: InventoryError.
    """
    try:
        return Inventory(
            taken_at=taken_at,
            gpus=tuple(_gpu(facts) for facts in report["gpus"]),
            faults=tuple(GpuFault(int(fault["index"]), str(fault["reason"])) for fault in report["faults"]),
            links=tuple(_link(link) for link in report["links"]),
            driver_version=str(report["driver_version"]),
            cuda_version=str(report["cuda_version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InventoryError(f"the NVML process's report cannot be read: {error!r}") from error


def _gpu(facts: Any) -> Gpu:  # noqa: ANN401
    major, minor = facts["arch"]
    numa_node = facts["numa_node"]
    return Gpu(
        index=int(facts["index"]),
        minor_number=int(facts["minor_number"]),
        uuid=GpuUuid(str(facts["uuid"])),
        pci_bus_id=PciBusId(str(facts["pci_bus_id"])),
        model=str(facts["model"]),
        memory_bytes=int(facts["memory_bytes"]),
        arch=(int(major), int(minor)),
        numa_node=None if numa_node is None else int(numa_node),
        mig_enabled=bool(facts["mig_enabled"]),
        brand=str(facts["brand"]),
        unavailable=str(facts["unavailable"]),
        mig=tuple(_mig_device(device) for device in facts["mig"]),
        drm=tuple(DrmNode(str(name), int(major), int(minor)) for name, major, minor in facts["drm"]),
        processes=_count(facts["processes"]),
    )


def _mig_device(facts: Any) -> MigDevice:  # noqa: ANN401
    """Without its minors: they are the kernel's to tell."""
    return MigDevice(
        index=int(facts["index"]),
        uuid=GpuUuid(str(facts["uuid"])),
        gpu_instance_id=int(facts["gpu_instance_id"]),
        compute_instance_id=int(facts["compute_instance_id"]),
        profile=str(facts["profile"]),
        memory_bytes=int(facts["memory_bytes"]),
        unavailable=str(facts["unavailable"]),
        processes=_count(facts["processes"]),
    )


def _count(found: Any) -> int | None:  # noqa: ANN401
    return None if found is None else int(found)


def _link(link: Any) -> Link:  # noqa: ANN401
    return Link(a=int(link["a"]), b=int(link["b"]), pcie=str(link["pcie"]), nvlink=int(link["nvlink"]))
