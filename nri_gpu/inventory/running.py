"""How many processes have a GPU or a MIG device open, as NVML tells it, by whichever of its functions there is."""

from __future__ import annotations

from typing import Any, Final

from nri_gpu.inventory.asking import ABSENT, Ask, CallError

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
