"""The `[[gpu]]` and `[[fault]]` tables of a topology file.

Where a value is wrong, that is noted and a substitute stands in, which nobody will see.
"""

from __future__ import annotations

import re
from typing import Final

from nri_gpu.domain.gpu import ComputeMode, DrmNode, Ecc, Fabric, FabricState, Gpu, GpuUuid, MigDevice, PciBusId
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import GpuFault
from nri_gpu.inventory.formats import (
    ADDRESSING,
    ARCHITECTURES,
    BYTES_MAX,
    DEVICE_MINOR_MAX,
    GPU_INDEX_MAX,
    NUMA_NODE_MAX,
    NVML_CODE_MAX,
    PROCESSES_MAX,
    UINT_MAX,
    UNKNOWN_PROFILE,
    compute_prohibited,
    parse_bus_id,
    parse_cluster,
    parse_cpulist,
    parse_drm_name,
    parse_mig_uuid,
    parse_model,
    parse_profile,
    parse_uuid,
)
from nri_gpu.inventory.mig_minors import CAP_MINOR_MAX, COMPUTE_INSTANCES_MAX, GPU_INSTANCES_MAX, usual_minors
from nri_gpu.requirements.grammar import BRANDS
from nri_gpu.simulation.tables import MAJOR_MAX, Table

NOT_KNOWN: Final = -1  # of a capability minor
_ARCH: Final = re.compile(r"([0-9]{1,2})\.([0-9]{1,2})")


def read_gpu(table: Table) -> Gpu:
    """One `[[gpu]]`."""
    index = table.number("index", 0, GPU_INDEX_MAX)
    minor = table.number("minor", 0, GPU_INDEX_MAX)
    uuid, bus_id = table.parsed("uuid", parse_uuid), table.parsed("bus_id", parse_bus_id)
    for key, value in (("index", index), ("minor", minor), ("uuid", uuid), ("bus_id", bus_id)):
        table.once(key, value, among="gpu")
    mig_enabled, instances = table.flag_or_tables("mig")
    memory_bytes = table.number("memory_bytes", 0, BYTES_MAX)
    compute_mode = table.one_of("compute_mode", ComputeMode) if table.has("compute_mode") else None
    unavailable = table.text("unavailable", default="") or ""
    if compute_mode == ComputeMode.PROHIBITED:
        unavailable = unavailable or compute_prohibited(bus_id or "")
    gpu = Gpu(
        index=index or 0,
        minor_number=minor or 0,
        uuid=uuid or GpuUuid(""),
        pci_bus_id=bus_id or PciBusId(""),
        model=table.parsed("model", parse_model) or "",
        memory_bytes=memory_bytes or 0,
        arch=table.parsed("arch", _parse_arch) or (0, 0),
        numa_node=table.number("numa", 0, NUMA_NODE_MAX, optional=True),
        mig_enabled=mig_enabled,
        brand=_brand(table),
        unavailable=unavailable,
        mig=read_mig_devices(instances, minor or 0, memory_bytes),
        drm=tuple(_drm_node(each) for each in table.tables("drm")),
        processes=table.number("processes", 0, PROCESSES_MAX, optional=True),
        signs=read_signs(table) or (),
        architecture=table.one_of("architecture", ("", *ARCHITECTURES.values()), default="") or "",
        cpus=table.parsed("cpus", lambda text: parse_cpulist(text) if text else "", default="") or "",
        compute_mode=ComputeMode(compute_mode) if compute_mode else None,
        persistence=table.maybe_flag("persistence"),
        ecc=_ecc(table),
        addressing=table.one_of("addressing", ("", *ADDRESSING), default="") or "",
        fabric=_fabric(table.table("fabric")) if table.has("fabric") else None,
    )
    table.done()
    return gpu


def read_fault(table: Table) -> GpuFault:
    """One `[[fault]]`: a GPU that exists and could not be described."""
    index = table.number("index", 0, GPU_INDEX_MAX)
    uuid, bus_id = table.parsed("uuid", parse_uuid, optional=True), table.parsed("bus_id", parse_bus_id, optional=True)
    for key, value in (("index", index), ("uuid", uuid), ("bus_id", bus_id)):
        table.once(key, value, among="gpu")
    fault = GpuFault(
        index=index or 0,
        reason=table.text("reason") or "",
        code=table.number("code", 0, NVML_CODE_MAX, optional=True) or 0,
        sign=table.parsed("sign", _parse_sign, optional=True),
        uuid=uuid or "",
        pci_bus_id=bus_id or "",
    )
    table.done()
    return fault


def read_signs(table: Table) -> tuple[Sign, ...] | None:
    """`signs`, an array or one text with commas; None where it is missing."""
    words = table.words("signs")
    if words is None:
        return None
    known = set(Sign)
    for word in words:
        if word not in known:
            table.wrong("signs", _no_sign(word))
    return tuple(dict.fromkeys(Sign(word) for word in words if word in known))


def read_mig_devices(tables: list[Table], gpu_minor: int, gpu_bytes: int | None) -> tuple[MigDevice, ...]:
    """The MIG devices of one GPU in the order of their indices. gpu_bytes: its memory; None: not known."""
    devices = [_mig_device(table, place, gpu_minor, gpu_bytes) for place, table in enumerate(tables)]
    return tuple(sorted(devices, key=lambda device: device.index))


def _mig_device(table: Table, place: int, gpu_minor: int, gpu_bytes: int | None) -> MigDevice:
    """Its index is its place in the file unless it gives another: NVML's list has holes."""
    index = table.number("index", 0, GPU_INSTANCES_MAX * COMPUTE_INSTANCES_MAX - 1, optional=True)
    table.once("index", (gpu_minor, place if index is None else index), among="mig")
    instance = table.number("gi", 0, GPU_INSTANCES_MAX - 1)
    compute = table.number("ci", 0, COMPUTE_INSTANCES_MAX - 1)
    uuid = table.parsed("uuid", parse_mig_uuid)
    table.once("uuid", uuid, among="gpu")
    if instance is not None and compute is not None:
        table.once("", (gpu_minor, instance, compute), among="mig")
    memory_bytes = table.number("memory_bytes", 0, BYTES_MAX) or 0
    if gpu_bytes and memory_bytes > gpu_bytes:
        table.wrong("memory_bytes", f"{memory_bytes} is more than its GPU has: {gpu_bytes}")
    usual = usual_minors(gpu_minor, instance or 0, compute or 0) or (None, None)
    device = MigDevice(
        index=place if index is None else index,
        uuid=uuid or GpuUuid(""),
        gpu_instance_id=instance or 0,
        compute_instance_id=compute or 0,
        profile=table.parsed("profile", _parse_profile) or "",
        memory_bytes=memory_bytes,
        gpu_instance_minor=_capability_minor(table, "gi_minor", usual[0]),
        compute_instance_minor=_capability_minor(table, "ci_minor", usual[1]),
        unavailable=table.text("unavailable", default="") or "",
        processes=table.number("processes", 0, PROCESSES_MAX, optional=True),
    )
    table.done()
    return device


def _capability_minor(table: Table, key: str, usual: int | None) -> int | None:
    """The file's minor, else the one that drivers use; -1 means that it is unknown."""
    minor = table.number(key, NOT_KNOWN, CAP_MINOR_MAX, optional=True)
    if minor == NOT_KNOWN:
        return None
    return usual if minor is None else minor


def _ecc(table: Table) -> Ecc | None:
    """`ecc_pending` is the same as `ecc` where it is left out."""
    current, pending = table.maybe_flag("ecc"), table.maybe_flag("ecc_pending")
    if current is None:
        if pending is not None:
            table.wrong("ecc_pending", "needs `ecc`, which is missing")
        return None
    return Ecc(current, current if pending is None else pending)


def _fabric(table: Table) -> Fabric:
    fabric = Fabric(
        state=FabricState(table.one_of("state", FabricState) or FabricState.COMPLETED),
        status=table.number("status", 0, UINT_MAX, optional=True) or 0,
        cluster=table.parsed("cluster", parse_cluster, default="") or "",
        clique=table.number("clique", 0, UINT_MAX, optional=True) or 0,
        health_mask=table.number("health_mask", 0, UINT_MAX, optional=True),
    )
    table.done()
    return fabric


def _drm_node(table: Table) -> DrmNode:
    name = table.parsed("name", parse_drm_name)
    table.once("name", name, among="drm")
    node = DrmNode(
        name=name or "",
        major=table.number("major", 1, MAJOR_MAX) or 0,
        minor=table.number("minor", 0, DEVICE_MINOR_MAX) or 0,
    )
    table.done()
    return node


def _brand(table: Table) -> str:
    """The brand as NVML names it; empty where the file gives none."""
    brand = table.text("brand", default="") or ""
    if brand and brand not in BRANDS:
        table.wrong("brand", f"{brand!r} is not a brand that NVML knows ({', '.join(BRANDS)})")
    return brand


def _parse_sign(text: str) -> Sign:
    """Raises: ValueError."""
    if text not in set(Sign):
        raise ValueError(_no_sign(text))
    return Sign(text)


def _no_sign(text: str) -> str:
    return f"{text!r} is not a sign ({', '.join(Sign)})"


def _parse_profile(text: str) -> str:
    """`unknown` is the profile of a device that NVML cannot describe. Raises: ValueError."""
    return text if text == UNKNOWN_PROFILE else parse_profile(text)


def _parse_arch(text: str) -> tuple[int, int]:
    """A text and not a number, because 8.10 is not 8.1. Raises: ValueError."""
    match = _ARCH.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a compute capability ("9.0")')
    return int(match.group(1)), int(match.group(2))
