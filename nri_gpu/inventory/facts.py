"""What is asked about how a GPU is set up: facts that each may be missing, and none of which is a fault of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nri_gpu.domain.gpu import ComputeMode, FabricState
from nri_gpu.files import text_of
from nri_gpu.inventory.asking import Ask, maybe
from nri_gpu.inventory.numa import parse_cpulist

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
