"""What is asked of NVML about the health of a GPU: optional facts, each missing on some GPUs and drivers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nri_gpu.domain.health import Sign
from nri_gpu.inventory.asking import FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, Ask, CallError, maybe

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
    found = [*_memory(ask, gpu, index), *_recovery(ask, gpu, index), *_fabric(fabric)]
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


def _fabric(info: Any) -> Iterator[Sign]:  # noqa: ANN401 (see facts.fabric_info)
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
