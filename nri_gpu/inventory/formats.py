"""What UUIDs, addresses, versions and NVML's enumerations look like: in reports, in topology files, on the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.gpu import MIG_PROFILE, ComputeMode, FabricState, GpuUuid, PciBusId

UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MIG_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
VERSION: Final = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,2}")
MODULE_VERSION: Final = re.compile(r"[0-9A-Za-z._+-]{0,64}")
CLUSTER_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BUS_ID: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
MODEL: Final = re.compile(r"[ -~]{1,96}")  # printable ASCII; 96 is NVML_DEVICE_NAME_V2_BUFFER_SIZE
# Nodes below /dev/dri that programs open. A card's folder in sysfs holds its connectors too.
DRM_NAME: Final = re.compile(r"(?:card|renderD)[0-9]{1,5}")
CPULIST: Final = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")
CPULIST_MAX: Final = 4096  # characters, one page of sysfs
SHOWN_MAX: Final = 96  # characters of a wrong value that an error message repeats

# Enumerations of nvml.h.
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
# State 0 belongs to a GPU that is not made for a fabric.
FABRIC_STATES: Final[Mapping[int, FabricState]] = dict(enumerate(FabricState, 1))
PCIE_PATHS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")  # as `nvidia-smi topo -m` names them, nearest first

GPU_INDEX_MAX: Final = 247  # /dev/nvidia0 to 247 (kernel-open/common/inc/nv-chardev-numbers.h); 255 is nvidiactl
DEVICE_MINOR_MAX: Final = 2**20 - 1  # 20 bits (linux/kdev_t.h)
NUMA_NODE_MAX: Final = 1023  # MAX_NUMNODES
NVLINKS_MAX: Final = 36  # NVML_NVLINK_MAX_LINKS
PROCESSES_MAX: Final = 2**22  # of a whole machine (Linux: PID_MAX_LIMIT)
NVML_CODE_MAX: Final = 999  # NVML_ERROR_UNKNOWN
UINT_MAX: Final = 2**32 - 1
BYTES_MAX: Final = 2**63 - 1
UNKNOWN_PROFILE: Final = "unknown"  # of a MIG device that NVML cannot describe


def parse_uuid(text: str) -> GpuUuid:
    """The UUID of a whole GPU. Raises: ValueError."""
    if not UUID.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a GPU UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return GpuUuid(text)


def parse_mig_uuid(text: str) -> GpuUuid:
    """The UUID of a MIG device, as drivers from 470 on write it. Raises: ValueError."""
    if not MIG_UUID.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a MIG UUID (MIG-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return GpuUuid(text)


def parse_profile(text: str) -> str:
    """A MIG profile. Raises: ValueError."""
    if not MIG_PROFILE.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a MIG profile (1g.10gb, 1c.3g.40gb, 1g.10gb+me)")
    return text


def profile_in(name: str) -> str:
    """The profile in a MIG device's name, `NVIDIA A100-SXM4-40GB MIG 1g.5gb`; empty where it has none."""
    last = name.rpartition(" MIG ")[2].lower()
    return last if " MIG " in name and MIG_PROFILE.fullmatch(last) else ""


def parse_bus_id(text: str) -> PciBusId:
    """A PCI address in lower case, with a domain of 4 digits where that is enough; NVML writes 8 digits in upper case.

    Raises: ValueError.
    """
    match = BUS_ID.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{_shown(text)} is not a PCI bus id (0000:3b:00.0)")
    domain, bus, device, function = match.groups()
    return PciBusId(f"{int(domain, 16):04x}:{bus}:{device}.{function}")


def parse_model(text: str) -> str:
    """A model name, as tables, logs and globs use it. Raises: ValueError."""
    if not MODEL.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a model name (1 to 96 printable ASCII characters)")
    return text


def parse_drm_name(text: str) -> str:
    """The name of a node below /dev/dri. Raises: ValueError."""
    if not DRM_NAME.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not the name of a DRM node (card0, renderD128)")
    return text


def parse_version(text: str) -> str:
    """The version of a driver or of CUDA; empty where it is unknown. Raises: ValueError."""
    if text and not VERSION.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a version (580.95.05)")
    return text


def parse_module_version(text: str) -> str:
    """The version of a kernel module, as its author wrote it; empty where it is unknown. Raises: ValueError."""
    if not MODULE_VERSION.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not the version of a kernel module (580.95.05)")
    return text


def parse_cluster(text: str) -> str:
    """The cluster UUID of an NVLink fabric; empty where it is unknown. Raises: ValueError."""
    if text and not CLUSTER_UUID.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a cluster UUID (xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return text


def parse_cpulist(text: str) -> str:
    """A list of CPUs in the kernel's syntax, `0-15,32-47`, unchanged. Raises: ValueError."""
    if len(text) > CPULIST_MAX or not CPULIST.fullmatch(text):
        raise ValueError(f'{_shown(text)} is not a list of CPUs ("0-15,32-47")')
    return text


def compute_prohibited(bus_id: str) -> str:
    """Why a GPU in compute mode `prohibited` cannot be granted, and what to do about it."""
    return f"its compute mode is prohibited, so no program can compute on it: run `nvidia-smi -i {bus_id} -c 0`"


def _shown(text: str) -> str:
    return repr(text[:SHOWN_MAX])
