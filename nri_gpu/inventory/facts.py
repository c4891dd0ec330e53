"""What is asked about how a GPU is set up: facts that each may be missing, and none of which is a fault of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nri_gpu.domain.gpu import ComputeMode, FabricState
from nri_gpu.domain.health import Sign
from nri_gpu.inventory.kernel import parse_cpulist
from nri_gpu.inventory.nvml_client import FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, Ask, CallError, maybe
from nri_gpu.system.storage import text_of

# Numbers of nvml.h, in words.
ARCHITECTURES: Final[Mapping[int, str]] = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada-lovelace",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
COMPUTE_MODES: Final = tuple(ComputeMode)  # in NVML's order
ADDRESSING: Final = ("none", "hmm", "ats")
# State 0 is of a GPU that is made for no fabric.
FABRIC_STATES: Final[Mapping[int, FabricState]] = dict(enumerate(FabricState, 1))
# The driver's kernel modules, as /sys/module names them.
MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")


def prohibited(bus_id: str) -> str:
    """Why a GPU in compute mode `prohibited` cannot be granted, and what to do about it."""
    return f"its compute mode is prohibited, so no program can compute on it: nvidia-smi -i {bus_id} -c 0 allows it"


def fabric_info(ask: Ask, gpu: object, index: int) -> Any:  # noqa: ANN401 (an nvmlGpuFabricInfo of either version)
    """What a GPU on NVSwitches is told of its fabric; None on others. Raises: CallError, for a GPU that is gone."""
    return maybe(ask, None, "nvmlDeviceGetGpuFabricInfoV", gpu, gpu=index)


def setup_facts(
    ask: Ask,
    gpu: object,
    index: int,
    folder: Path,
    fabric: Any,  # noqa: ANN401 (as above)
) -> Iterator[Mapping[str, object]]:
    """Plain data, one fact after the other. gpu: its handle. folder: the PCI device's, in sysfs. fabric: its info.

    Raises: CallError, for a GPU that is gone.
    """
    yield {"cpus": _cpus(folder)}
    number = maybe(ask, None, "nvmlDeviceGetArchitecture", gpu, gpu=index)
    yield {"architecture": ARCHITECTURES.get(number, "")}
    mode = maybe(ask, None, "nvmlDeviceGetComputeMode", gpu, gpu=index)
    yield {"compute_mode": COMPUTE_MODES[mode] if mode in range(len(COMPUTE_MODES)) else None}
    persistence = maybe(ask, None, "nvmlDeviceGetPersistenceMode", gpu, gpu=index)
    yield {"persistence": None if persistence is None else bool(persistence)}
    ecc = maybe(ask, None, "nvmlDeviceGetEccMode", gpu, gpu=index)
    yield {"ecc": None if ecc is None else [bool(each) for each in ecc]}
    addressing = maybe(ask, None, "nvmlDeviceGetAddressingMode", gpu, gpu=index)
    yield {"addressing": ADDRESSING[addressing] if addressing in range(len(ADDRESSING)) else ""}
    yield {"fabric": _fabric(fabric)}


def module_versions(sysfs: Path) -> dict[str, str]:
    """The version of each of the driver's modules that is loaded; empty where a module does not tell."""
    return {name: _line(sysfs / "module" / name / "version") for name in MODULES if (sysfs / "module" / name).is_dir()}


def _cpus(folder: Path) -> str:
    try:
        return parse_cpulist(_line(folder / "local_cpulist"))
    except ValueError:
        return ""


def _fabric(info: Any) -> dict[str, object] | None:  # noqa: ANN401 (an nvmlGpuFabricInfo of either version)
    state = None if info is None else FABRIC_STATES.get(info.state)
    if state is None:
        return None
    cluster = bytes(info.clusterUuid).hex()
    return {
        "state": state,
        "status": int(info.status),
        "cluster": f"{cluster[:8]}-{cluster[8:12]}-{cluster[12:16]}-{cluster[16:20]}-{cluster[20:]}",
        "clique": int(info.cliqueId),
        "health_mask": getattr(info, "healthMask", None),
    }


def _line(path: Path) -> str:
    return (text_of(path) or "").strip()


# Numbers of nvml.h.
FIELD_RECOVERY_ACTION: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, from R570 on
# GPU_RESET, NODE_REBOOT, DRAIN_AND_RESET, BUS_RESET, SYSTEM_REBOOT; the others are about its peers, or nothing.
RESET_ACTIONS: Final = frozenset({1, 2, 4, 6, 7})
FABRIC_STARTING: Final = frozenset({1, 2})  # NVML_GPU_FABRIC_STATE_NOT_STARTED, _IN_PROGRESS
FABRIC_COMPLETED: Final = 3
# nvmlClocksEventReasonSwThermalSlowdown, ...HwThermalSlowdown, ...HwPowerBrakeSlowdown
THERMAL_REASONS: Final = 0x20 | 0x40
POWER_BRAKE_REASON: Final = 0x80

_LOST: Final[Mapping[int, Sign]] = {GPU_IS_LOST: Sign.LOST, RESET_REQUIRED: Sign.RESET_REQUIRED}


def signs(ask: Ask, gpu: object, index: int, fabric: Any) -> list[Sign]:  # noqa: ANN401 (see facts.fabric_info)
    """What NVML says of a GPU's health. gpu: its handle. index: its NVML index. fabric: what it is told of its fabric.

    Raises: CallError, for a GPU that is gone.
    """
    found = [*_memory(ask, gpu, index), *_recovery(ask, gpu, index), *_fabric_sign(fabric)]
    return [*found, *_clocks(ask, gpu, index)]


def sign_of(error: CallError) -> list[Sign]:
    """What it means that a call failed without which a GPU cannot be described."""
    if error.code in _LOST:
        return [_LOST[error.code]]
    return [Sign.UNREADABLE] if error.code else []  # an answer was unreadable, and not the GPU


def _memory(ask: Ask, gpu: object, index: int) -> Iterator[Sign]:
    """From Ampere on, rows of memory that fail are replaced by spare ones."""
    _, _, pending, failed = maybe(ask, (0, 0, 0, 0), "nvmlDeviceGetRemappedRows", gpu, gpu=index)
    if failed:
        yield Sign.REMAP_FAILED
    if pending:
        yield Sign.REMAP_PENDING


def _recovery(ask: Ask, gpu: object, index: int) -> Iterator[Sign]:
    fields = maybe(ask, (), "nvmlDeviceGetFieldValues", gpu, [FIELD_RECOVERY_ACTION], gpu=index)
    # Each field has a return code of its own.
    if any(field.nvmlReturn == 0 and field.value.uiVal in RESET_ACTIONS for field in fields):
        yield Sign.RESET_REQUIRED


def _fabric_sign(info: Any) -> Iterator[Sign]:  # noqa: ANN401 (see facts.fabric_info)
    """Of GPUs on NVSwitches; what is on none says so."""
    if info is not None and (info.state in FABRIC_STARTING or (info.state == FABRIC_COMPLETED and info.status != 0)):
        yield Sign.FABRIC_NOT_READY


def _clocks(ask: Ask, gpu: object, index: int) -> Iterator[Sign]:
    reasons = _clock_reasons(ask, gpu, index)
    if reasons & THERMAL_REASONS:
        yield Sign.THERMAL
    if reasons & POWER_BRAKE_REASON:
        yield Sign.POWER_BRAKE


def _clock_reasons(ask: Ask, gpu: object, index: int) -> int:
    """By its newer name, or the one before R535."""
    try:
        return int(ask("nvmlDeviceGetCurrentClocksEventReasons", gpu, gpu=index))
    except CallError as error:
        if error.code != FUNCTION_NOT_FOUND:
            return 0
    return int(maybe(ask, 0, "nvmlDeviceGetCurrentClocksThrottleReasons", gpu, gpu=index))
