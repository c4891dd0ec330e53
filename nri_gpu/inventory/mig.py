"""How many processes have a GPU or a MIG device open, as NVML tells it, by whichever of its functions there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nri_gpu.inventory.identity import parse_mig_uuid, profile_in
from nri_gpu.inventory.nvml_client import ABSENT, GONE, INVALID_ARGUMENT, NOT_FOUND, Ask, CallError, maybe, parsed

# With their versions: nvidia-ml-py's names without one raise an error that is none of NVML's where the driver is older
# than it. What an older driver has instead is `symbols.py`'s to know.
_COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses_v3"
_GRAPHICS: Final = "nvmlDeviceGetGraphicsRunningProcesses_v3"


def running(ask: Ask, device: object, index: int) -> int | None:
    """Processes with a compute or a graphics context on it; None where that cannot be told.

    device: the NVML handle of a GPU or a MIG device. index: the GPU's NVML index.
    """
    try:
        compute, graphics = _listed(ask, _COMPUTE, device, index), _listed(ask, _GRAPHICS, device, index)
    except CallError:
        return None
    if compute is None:  # a GPU that does no graphics is no less known for it
        return None
    return len({process.pid for process in (*compute, *(graphics or ()))})


def _listed(ask: Ask, name: str, device: object, index: int) -> list[Any] | None:
    """None where this driver or device has no such list. Raises: CallError, on any other failure."""
    try:
        found: list[Any] = ask(name, device, gpu=index)
    except CallError as error:
        if error.code not in ABSENT:
            raise
        return None
    return found


MIB: Final = 2**20
GIB: Final = 2**30
# No MIG device at this index: never made, or removed since. The list has holes: NVML does not move the others up.
_HOLE: Final = frozenset({INVALID_ARGUMENT, NOT_FOUND})
# Memory is cut into eight slices (NVIDIA's MIG guide); profiles are named after whole slices, not after what is left.
_MEMORY_SLICES: Final = 8


def mig_devices(ask: Ask, gpu: object, index: int) -> list[dict[str, object]]:
    """The MIG devices of a GPU, plain data. gpu: its NVML handle. index: its NVML index.

    Raises: CallError, where they cannot be listed or named, since who is left out then would be a guess.
    """
    memory = maybe(ask, None, "nvmlDeviceGetMemoryInfo", gpu, gpu=index)
    total_bytes = int(memory.total) if memory else 0
    found = []
    for place in range(ask("nvmlDeviceGetMaxMigDeviceCount", gpu, gpu=index)):
        try:
            facts = _identify(ask, ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place, gpu=index), place, index)
        except CallError as error:
            if error.code not in _HOLE:
                raise
            continue
        _describe(ask, facts, index, total_bytes)
        found.append({name: fact for name, fact in facts.items() if name != "handle"})
    return found


def profile_name(slices: Any, total_bytes: int) -> str:  # noqa: ANN401 (an nvmlDeviceAttributes_t)
    """`1g.10gb`, `1c.3g.40gb`, of a driver that does not name it. Attributes such as `+me` are not told here.

    slices: nvmlDeviceGetAttributes_v2 of the MIG device. total_bytes: memory of the whole GPU.
    """
    total_gib = -(-total_bytes // GIB)
    eighths = -(-slices.memorySizeMB * MIB * _MEMORY_SLICES // total_bytes)
    gigabytes = (eighths * total_gib + _MEMORY_SLICES // 2) // _MEMORY_SLICES
    gpu, compute = slices.gpuInstanceSliceCount, slices.computeInstanceSliceCount
    return f"{f'{compute}c.' if compute != gpu else ''}{gpu}g.{gigabytes}gb"


def _identify(ask: Ask, handle: object, place: int, gpu: int) -> dict[str, object]:
    """Raises: CallError."""
    return {
        "handle": handle,
        "index": place,
        "uuid": parsed(parse_mig_uuid, ask("nvmlDeviceGetUUID", handle, gpu=gpu), "nvmlDeviceGetUUID"),
        "gpu_instance_id": int(ask("nvmlDeviceGetGpuInstanceId", handle, gpu=gpu)),
        "compute_instance_id": int(ask("nvmlDeviceGetComputeInstanceId", handle, gpu=gpu)),
    }


def _describe(ask: Ask, facts: dict[str, object], gpu: int, total_bytes: int) -> None:
    """The rest; a MIG device that fails here keeps its name and is unavailable.

    Raises: CallError, for a GPU that is gone.
    """
    facts |= {"profile": "unknown", "memory_bytes": 0, "unavailable": "", "processes": None}
    try:
        for some in _descriptions(ask, facts["handle"], gpu, total_bytes):
            facts |= some
    except CallError as error:
        if error.code in GONE:
            raise
        facts["unavailable"] = str(error)


def _descriptions(ask: Ask, handle: object, gpu: int, total_bytes: int) -> Iterator[Mapping[str, object]]:
    attributes = ask("nvmlDeviceGetAttributes_v2", handle, gpu=gpu)
    yield {"memory_bytes": int(attributes.memorySizeMB) * MIB}
    # The driver's own word is the last of the device's name: it alone knows of `+me` and the like.
    named = profile_in(ask("nvmlDeviceGetName", handle, gpu=gpu))
    if named or total_bytes:
        yield {"profile": named or profile_name(attributes, total_bytes)}
    yield {"processes": running(ask, handle, gpu)}
