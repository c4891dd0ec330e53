"""A GPU's MIG devices, and the number of processes on a GPU or MIG device, read through NVML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nri_gpu.inventory.formats import UNKNOWN_PROFILE, parse_mig_uuid, profile_in
from nri_gpu.inventory.nvml_client import GPU_GONE, INVALID_ARGUMENT, NOT_FOUND, NvmlCallError, NvmlClient

# With their versions: nvidia-ml-py's names without one raise another error than NVML's on an older driver.
_COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses_v3"
_GRAPHICS: Final = "nvmlDeviceGetGraphicsRunningProcesses_v3"
MIB: Final = 2**20
GIB: Final = 2**30
# No MIG device at this index: never made, or removed since. NVML's list has holes, it does not move the others up.
_NO_DEVICE: Final = frozenset({INVALID_ARGUMENT, NOT_FOUND})
# Memory is cut into eight slices (NVIDIA's MIG guide); profiles are named after whole slices, not after what is left.
_MEMORY_SLICES: Final = 8


def process_count(nvml: NvmlClient, device: object, index: int) -> int | None:
    """The number of processes with a compute or graphics context; None where NVML cannot tell.

    device: the handle of a GPU or a MIG device. index: the GPU's.
    """
    try:
        compute = nvml.if_supported(_COMPUTE, device, gpu=index)
        graphics = nvml.if_supported(_GRAPHICS, device, default=(), gpu=index)
    except NvmlCallError:
        return None
    return None if compute is None else len({process.pid for process in (*compute, *graphics)})


def mig_devices(nvml: NvmlClient, gpu: object, index: int) -> list[dict[str, object]]:
    """The MIG devices of a GPU, plain data. gpu: its handle. index: its NVML index.

    Raises: NvmlCallError, where the list of them would not be complete.
    """
    memory = nvml.optional("nvmlDeviceGetMemoryInfo", gpu, gpu=index)
    total_bytes = int(memory.total) if memory else 0
    devices = []
    for place in range(nvml.call("nvmlDeviceGetMaxMigDeviceCount", gpu, gpu=index)):
        try:
            handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place, gpu=index)
            device = {"index": place} | _identity(nvml, handle, index)
        except NvmlCallError as error:
            if error.code not in _NO_DEVICE:
                raise
            continue
        _describe(nvml, device, handle, index, total_bytes)
        devices.append(device)
    return devices


def profile_name(attributes: Any, total_bytes: int) -> str:  # noqa: ANN401 (an nvmlDeviceAttributes_t)
    """`1g.10gb`, `1c.3g.40gb`, for a driver that does not name it, and without suffixes such as `+me`.

    attributes: nvmlDeviceGetAttributes_v2 of the MIG device. total_bytes: memory of the whole GPU.
    """
    total_gib = -(-total_bytes // GIB)
    eighths = -(-attributes.memorySizeMB * MIB * _MEMORY_SLICES // total_bytes)
    gigabytes = (eighths * total_gib + _MEMORY_SLICES // 2) // _MEMORY_SLICES
    gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    return f"{f'{compute}c.' if compute != gpu else ''}{gpu}g.{gigabytes}gb"


def _identity(nvml: NvmlClient, handle: object, gpu: int) -> dict[str, object]:
    """Raises: NvmlCallError."""
    return {
        "uuid": nvml.parsed(parse_mig_uuid, "nvmlDeviceGetUUID", handle, gpu=gpu),
        "gpu_instance_id": int(nvml.call("nvmlDeviceGetGpuInstanceId", handle, gpu=gpu)),
        "compute_instance_id": int(nvml.call("nvmlDeviceGetComputeInstanceId", handle, gpu=gpu)),
    }


def _describe(nvml: NvmlClient, device: dict[str, object], handle: object, gpu: int, total_bytes: int) -> None:
    """Reads the other facts. A MIG device that fails here keeps its name and is unavailable.

    Raises: NvmlCallError, when the GPU is gone.
    """
    device |= {"profile": UNKNOWN_PROFILE, "memory_bytes": 0, "unavailable": "", "processes": None}
    try:
        for facts in _descriptions(nvml, handle, gpu, total_bytes):
            device |= facts
    except NvmlCallError as error:
        if error.code in GPU_GONE:
            raise
        device["unavailable"] = str(error)


def _descriptions(nvml: NvmlClient, handle: object, gpu: int, total_bytes: int) -> Iterator[Mapping[str, object]]:
    attributes = nvml.call("nvmlDeviceGetAttributes_v2", handle, gpu=gpu)
    yield {"memory_bytes": int(attributes.memorySizeMB) * MIB}
    # The driver ends the device's name with the profile; only that has suffixes such as `+me`.
    named = profile_in(nvml.call("nvmlDeviceGetName", handle, gpu=gpu))
    if named or total_bytes:
        yield {"profile": named or profile_name(attributes, total_bytes)}
    yield {"processes": process_count(nvml, handle, gpu)}
