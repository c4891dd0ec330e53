"""The facts of one GPU from NVML and sysfs: its setup, signs of its health, its MIG devices and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from nri_gpu.domain.bounds import (
    ADDRESSING,
    ARCHITECTURES,
    CPULIST,
    MIG_UUID,
    PCIE_ROOT,
    STARTED_MAX,
    UNKNOWN_PROFILE,
    profile_in,
)
from nri_gpu.domain.gpu import ComputeMode, FabricState
from nri_gpu.domain.health import RESETS, RecoveryAction, Sign
from nri_gpu.inventory.library import FUNCTION_NOT_FOUND
from nri_gpu.inventory.nvml_client import (
    GPU_GONE,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESET_REQUIRED,
    NvmlCallError,
    NvmlClient,
)
from nri_gpu.system.proc import PROC, has_hosts_pids, parse_stat
from nri_gpu.system.storage import text_of

# Numbers of nvml.h.
FIELD_RECOVERY_ACTION: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, from R570 on
COMPUTE_MODES: Final[Mapping[int, ComputeMode]] = dict(enumerate(ComputeMode))
RECOVERY_ACTIONS: Final[Mapping[int, RecoveryAction]] = dict(enumerate(RecoveryAction))
# State 0 belongs to a GPU that is not made for a fabric.
FABRIC_STATES: Final[Mapping[int, FabricState]] = dict(enumerate(FabricState, 1))
FABRIC_STARTING: Final = frozenset({1, 2})  # NVML_GPU_FABRIC_STATE_NOT_STARTED, _IN_PROGRESS
FABRIC_COMPLETED: Final = 3
# nvmlClocksEventReasonSwThermalSlowdown, ...HwThermalSlowdown, ...HwPowerBrakeSlowdown
THERMAL_REASONS: Final = 0x20 | 0x40
POWER_BRAKE_REASON: Final = 0x80
# The names have versions: without one, nvidia-ml-py raises a different error from NVML's on an older driver.
_COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses_v3"
_GRAPHICS: Final = "nvmlDeviceGetGraphicsRunningProcesses_v3"
MIB: Final = 2**20
GIB: Final = 2**30
# No MIG device at this index: never made, or removed since. NVML's list has holes, it does not move the others up.
_NO_DEVICE: Final = frozenset({INVALID_ARGUMENT, NOT_FOUND})
# Memory is cut into eight slices (NVIDIA's MIG guide); profiles are named after whole slices, not after what is left.
_MEMORY_SLICES: Final = 8


class FabricInfo(Protocol):
    """An nvmlGpuFabricInfo of either version."""

    state: int
    status: int
    cliqueId: int
    clusterUuid: Iterable[int]


class MigAttributes(Protocol):
    """An nvmlDeviceAttributes_t."""

    memorySizeMB: int
    gpuInstanceSliceCount: int
    computeInstanceSliceCount: int
    multiprocessorCount: int
    sharedCopyEngineCount: int
    sharedDecoderCount: int
    sharedEncoderCount: int
    sharedJpegCount: int
    sharedOfaCount: int


# Fact, call, and what its answer means; the answer is None where the call fails.
_SETUP: Final[tuple[tuple[str, str, Callable[..., object]], ...]] = (
    ("architecture", "nvmlDeviceGetArchitecture", lambda number: ARCHITECTURES.get(number, "")),
    ("compute_mode", "nvmlDeviceGetComputeMode", COMPUTE_MODES.get),
    ("persistence", "nvmlDeviceGetPersistenceMode", lambda on: None if on is None else bool(on)),
    (
        "ecc",
        "nvmlDeviceGetEccMode",
        lambda ecc: None if ecc is None else {"current": bool(ecc[0]), "pending": bool(ecc[1])},
    ),
    ("addressing", "nvmlDeviceGetAddressingMode", lambda number: dict(enumerate(ADDRESSING)).get(number, "")),
)


def setup_facts(
    nvml: NvmlClient, handle: object, index: int, folder: Path, fabric: FabricInfo | None
) -> Iterator[Mapping[str, object]]:
    """Yield the setup as plain data, fact by fact. folder: the PCI device's, in sysfs. fabric: of a GPU that has one.

    Raises: NvmlCallError, when the GPU is gone.
    """
    yield {"cpus": CPULIST.or_empty((text_of(folder / "local_cpulist") or "").strip())}
    # A link to /sys/devices/pci0000:c9/0000:c9:01.0/0000:ca:00.0
    yield {"pcie_root": next(filter(PCIE_ROOT.matches, folder.resolve().parts), "")}
    for fact, call, meaning in _SETUP:
        yield {fact: meaning(nvml.optional(call, handle, gpu=index))}
    yield {"fabric": _fabric(fabric)}


def health_facts(nvml: NvmlClient, handle: object, index: int, fabric: FabricInfo | None) -> Mapping[str, object]:
    """Return NVML's facts about a GPU's health. Raises: NvmlCallError, when the GPU is gone."""
    # From Ampere on, spare rows of memory replace those that fail.
    rows = nvml.optional("nvmlDeviceGetRemappedRows", handle, gpu=index)
    pending, failed = (None, None) if rows is None else (bool(rows[2]), bool(rows[3]))
    action = _recovery_action(nvml, handle, index)
    signs = [
        *([Sign.REMAP_FAILED] if failed else []),
        *([Sign.REMAP_PENDING] if pending else []),
        *([Sign.RESET_REQUIRED] if action in RESETS else []),
        *_fabric_signs(fabric),
        *_clock_signs(nvml, handle, index),
    ]
    return {"remap_pending": pending, "recovery_action": action, "signs": signs}


def sign_of(error: NvmlCallError) -> Sign | None:
    """Return the sign of bad health that the failure of a necessary call shows, or None."""
    if error.code == GPU_IS_LOST:
        return Sign.LOST
    if error.code == RESET_REQUIRED:
        return Sign.RESET_REQUIRED
    return Sign.UNREADABLE if error.code else None  # 0: the answer could not be read, and the GPU did answer


def _fabric(info: FabricInfo | None) -> dict[str, object] | None:
    if info is None or info.state not in FABRIC_STATES:
        return None
    cluster = bytes(info.clusterUuid).hex()
    return {
        "state": FABRIC_STATES[info.state],
        "status": int(info.status),
        "cluster": f"{cluster[:8]}-{cluster[8:12]}-{cluster[12:16]}-{cluster[16:20]}-{cluster[20:]}",
        "clique": int(info.cliqueId),
        "health_mask": getattr(info, "healthMask", None),
    }


def _recovery_action(nvml: NvmlClient, handle: object, index: int) -> RecoveryAction | None:
    """Return the action that the driver wants, or None if it names none or one that we do not know."""
    fields = nvml.optional("nvmlDeviceGetFieldValues", handle, [FIELD_RECOVERY_ACTION], default=(), gpu=index)
    # Each field has a return code of its own.
    found = [field.value.uiVal for field in fields if field.nvmlReturn == 0]
    return RECOVERY_ACTIONS.get(found[0]) if found else None


def _fabric_signs(info: FabricInfo | None) -> Iterator[Sign]:
    if info is not None and (info.state in FABRIC_STARTING or (info.state == FABRIC_COMPLETED and info.status != 0)):
        yield Sign.FABRIC_NOT_READY


def _clock_signs(nvml: NvmlClient, handle: object, index: int) -> Iterator[Sign]:
    reasons = _clock_reasons(nvml, handle, index)
    if reasons & THERMAL_REASONS:
        yield Sign.THERMAL
    if reasons & POWER_BRAKE_REASON:
        yield Sign.POWER_BRAKE


def _clock_reasons(nvml: NvmlClient, handle: object, index: int) -> int:
    """Read the reasons by the function's newer name, or by the older one before R535."""
    try:
        return int(nvml.call("nvmlDeviceGetCurrentClocksEventReasons", handle, gpu=index))
    except NvmlCallError as error:
        if error.code != FUNCTION_NOT_FOUND:
            return 0
    return int(nvml.optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle, default=0, gpu=index))


def process_facts(nvml: NvmlClient, device: object, index: int) -> Mapping[str, object]:
    """Return the number of processes with a compute or graphics context, their PIDs, and when they started.

    device: the handle of a GPU or a MIG device. index: the GPU's.
    """
    try:
        compute = nvml.if_supported(_COMPUTE, device, gpu=index)
        graphics = nvml.if_supported(_GRAPHICS, device, default=(), gpu=index)
    except NvmlCallError:
        return {}
    pids = {process.pid for process in (*compute, *graphics)} if compute is not None else set[int]()
    started = _started(pids)
    return {
        "processes": None if compute is None else len(pids),
        "started": list(started.values()),
        "pids": list(started),
    }


def _started(pids: Iterable[int]) -> Mapping[int, int]:
    """Return when each process that can be seen started, by PID.

    NVML names processes by the PIDs of its own namespace, or the host's.
    """
    texts = ((pid, text_of(PROC / str(pid) / "stat")) for pid in pids) if has_hosts_pids() else ()
    return dict(islice(((pid, parse_stat(text).started) for pid, text in texts if text), STARTED_MAX))


def mig_devices(nvml: NvmlClient, gpu: object, index: int) -> list[dict[str, object]]:
    """Return the MIG devices of a GPU as plain data. gpu: its handle. index: its NVML index.

    Raises: NvmlCallError, if the list would not be complete.
    """
    memory = nvml.optional("nvmlDeviceGetMemoryInfo", gpu, gpu=index)
    total_bytes = int(memory.total) if memory else 0
    devices = []
    for place in range(nvml.call("nvmlDeviceGetMaxMigDeviceCount", gpu, gpu=index)):
        try:
            handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place, gpu=index)
            device = {"index": place} | _mig_identity(nvml, handle, index)
        except NvmlCallError as error:
            if error.code not in _NO_DEVICE:
                raise
            continue
        _describe_mig(nvml, device, handle, gpu, index, total_bytes)
        devices.append(device)
    return devices


def profile_name(attributes: MigAttributes, total_bytes: int) -> str:
    """Return `1g.10gb` or `1c.3g.40gb`, without suffixes such as `+me`, for a driver that does not name the profile.

    attributes: nvmlDeviceGetAttributes_v2 of the MIG device. total_bytes: memory of the whole GPU.
    """
    total_gib = -(-total_bytes // GIB)
    eighths = -(-attributes.memorySizeMB * MIB * _MEMORY_SLICES // total_bytes)
    gigabytes = (eighths * total_gib + _MEMORY_SLICES // 2) // _MEMORY_SLICES
    gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    return f"{f'{compute}c.' if compute != gpu else ''}{gpu}g.{gigabytes}gb"


def _engines(attributes: MigAttributes) -> dict[str, int]:
    return {
        "multiprocessors": int(attributes.multiprocessorCount),
        "copy_engines": int(attributes.sharedCopyEngineCount),
        "decoders": int(attributes.sharedDecoderCount),
        "encoders": int(attributes.sharedEncoderCount),
        "jpeg_engines": int(attributes.sharedJpegCount),
        "ofa_engines": int(attributes.sharedOfaCount),
    }


def _mig_identity(nvml: NvmlClient, handle: object, gpu: int) -> dict[str, object]:
    """Return the facts that name a MIG device. Raises: NvmlCallError."""
    return {
        "uuid": nvml.parsed(MIG_UUID.parse, "nvmlDeviceGetUUID", handle, gpu=gpu),
        "gpu_instance_id": int(nvml.call("nvmlDeviceGetGpuInstanceId", handle, gpu=gpu)),
        "compute_instance_id": int(nvml.call("nvmlDeviceGetComputeInstanceId", handle, gpu=gpu)),
    }


def _describe_mig(
    nvml: NvmlClient, device: dict[str, object], handle: object, whole: object, gpu: int, total_bytes: int
) -> None:
    """Read the other facts. A MIG device that fails here keeps its name and is unavailable. whole: its GPU's handle.

    Raises: NvmlCallError, when the GPU is gone.
    """
    device["profile"] = UNKNOWN_PROFILE
    try:
        for facts in _mig_descriptions(nvml, handle, gpu, total_bytes):
            device |= facts
        device["placement"] = _placement(nvml, whole, device["gpu_instance_id"], gpu)
    except NvmlCallError as error:
        if error.code in GPU_GONE:
            raise
        device["unavailable"] = str(error)


def _placement(nvml: NvmlClient, whole: object, instance_id: object, gpu: int) -> int | None:
    instance = nvml.optional("nvmlDeviceGetGpuInstanceById", whole, instance_id, gpu=gpu)
    found = None if instance is None else nvml.optional("nvmlGpuInstanceGetInfo", instance, gpu=gpu)
    return None if found is None else int(found.placement.start)


def _mig_descriptions(nvml: NvmlClient, handle: object, gpu: int, total_bytes: int) -> Iterator[Mapping[str, object]]:
    attributes = nvml.call("nvmlDeviceGetAttributes_v2", handle, gpu=gpu)
    yield {"memory_bytes": attributes.memorySizeMB * MIB, "engines": _engines(attributes)}
    # The driver ends the device's name with the profile; only that has suffixes such as `+me`.
    named = profile_in(nvml.call("nvmlDeviceGetName", handle, gpu=gpu))
    if named or total_bytes:
        yield {"profile": named or profile_name(attributes, total_bytes)}
    yield process_facts(nvml, handle, gpu)
