"""What a topology file says of a GPU's MIG devices: `[[gpu.mig]]`."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.gpu import GpuUuid, MigDevice
from nri_gpu.inventory.capabilities import CAP_MINOR_MAX, COMPUTE_INSTANCES_MAX, GPU_INSTANCES_MAX, usual_minors
from nri_gpu.inventory.identity import parse_mig_uuid, parse_profile
from nri_gpu.inventory.report import PROCESSES_MAX
from nri_gpu.inventory.table import Table

NOT_KNOWN: Final = -1
UNKNOWN: Final = "unknown"


def mig_devices(tables: list[Table], gpu_minor: int, gpu_bytes: int | None) -> tuple[MigDevice, ...]:
    """The MIG devices of one GPU in the order of their indices. gpu_bytes: its memory, where that is known."""
    devices = [_mig_device(each, place, gpu_minor, gpu_bytes) for place, each in enumerate(tables)]
    return tuple(sorted(devices, key=lambda device: device.index))


def _mig_device(table: Table, place: int, gpu_minor: int, gpu_bytes: int | None) -> MigDevice:
    """Its place in the file is its index, unless it says another: NVML's list has holes."""
    index = table.number("index", 0, GPU_INSTANCES_MAX * COMPUTE_INSTANCES_MAX - 1, optional=True)
    table.once("index", (gpu_minor, place if index is None else index), among="mig")
    instance = table.number("gi", 0, GPU_INSTANCES_MAX - 1)
    compute = table.number("ci", 0, COMPUTE_INSTANCES_MAX - 1)
    uuid = table.parsed("uuid", parse_mig_uuid)
    table.once("uuid", uuid, among="gpu")
    if instance is not None and compute is not None:
        table.once("", (gpu_minor, instance, compute), among="mig")
    memory_bytes = table.number("memory_bytes", 0, 2**63 - 1) or 0
    if gpu_bytes and memory_bytes > gpu_bytes:
        table.wrong("memory_bytes", f"{memory_bytes} is more than its GPU has: {gpu_bytes}")
    minors = _cap_minors(table, usual_minors(gpu_minor, instance or 0, compute or 0))
    device = MigDevice(
        index=place if index is None else index,
        uuid=uuid or GpuUuid(""),
        gpu_instance_id=instance or 0,
        compute_instance_id=compute or 0,
        profile=table.parsed("profile", _parse_profile) or "",
        memory_bytes=memory_bytes,
        gpu_instance_minor=minors[0],
        compute_instance_minor=minors[1],
        unavailable=table.text("unavailable", default="") or "",
        processes=table.number("processes", 0, PROCESSES_MAX, optional=True),
    )
    table.done()
    return device


def _cap_minors(table: Table, usual: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Those that drivers use where the file says none; -1: nobody knows them."""
    said = tuple(table.number(key, NOT_KNOWN, CAP_MINOR_MAX, optional=True) for key in ("gi_minor", "ci_minor"))
    minors = [said[at] if said[at] is not None or usual is None else usual[at] for at in (0, 1)]
    return (
        None if minors[0] == NOT_KNOWN else minors[0],
        None if minors[1] == NOT_KNOWN else minors[1],
    )


def _parse_profile(text: str) -> str:
    """`unknown` is what NVML's survey says of a device that it cannot describe. Raises: ValueError."""
    return text if text == UNKNOWN else parse_profile(text)
