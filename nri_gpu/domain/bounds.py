"""The forms of UUIDs, addresses, versions and NVML's enumerations: in reports, in topology files, on the host.

Types with bounds are checked where a document is read, never where code builds a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

SHOWN_MAX: Final = 96  # characters of a wrong value that an error message repeats


class Format(Struct, frozen=True):
    """A form of texts. description: what such a text is, with an example."""

    pattern: str
    description: str

    def matches(self, text: str) -> bool:
        """Return whether the whole text has this form."""
        return re.fullmatch(self.pattern, text) is not None

    def parse(self, text: str) -> str:
        """Return the text if it has this form. Raises: ValueError."""
        if not self.matches(text):
            raise ValueError(f"{text[:SHOWN_MAX]!r} is not {self.description}")
        return text

    def or_empty(self, text: str) -> str:
        """Return the text if it has this form, or empty."""
        return text if self.matches(text) else ""

    def meta(self, *others: str) -> Meta:
        """Describe a field that holds such a text, or a text of `others`."""
        choices = "|".join([f"(?:{self.pattern})", *map(re.escape, others)])
        return Meta(pattern=rf"\A(?:{choices})\Z", description=self.description)


def one_of(words: Iterable[str]) -> Meta:
    """Describe a field that holds a word of these."""
    known = tuple(words)
    return Meta(
        pattern=rf"\A(?:{'|'.join(map(re.escape, known))})\Z", description=f"one of {', '.join(filter(None, known))}"
    )


_UUID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID_SHOWN: Final = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex"
UUID: Final = Format(f"GPU-{_UUID}", f"a GPU UUID (GPU-{_UUID_SHOWN})")
MIG_UUID: Final = Format(f"MIG-{_UUID}", f"a MIG UUID (MIG-{_UUID_SHOWN})")  # as drivers from 470 on write it
CLUSTER_UUID: Final = Format(_UUID, f"a cluster UUID ({_UUID_SHOWN})")  # of an NVLink fabric
VERSION: Final = Format(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,2}", "a version (580.95.05)")  # of a driver, or of CUDA
MODULE_VERSION: Final = Format("[0-9A-Za-z._+-]{0,64}", "the version of a kernel module (580.95.05)")
BUS_ID: Final = Format("[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]", "a PCI bus id (0000:3b:00.0)")
PCIE_ROOT: Final = Format("pci[0-9a-f]{4,8}:[0-9a-f]{2}", "a PCIe root (pci0000:c9)")  # as sysfs names it
# 96 is NVML_DEVICE_NAME_V2_BUFFER_SIZE.
MODEL: Final = Format("[ -~]{1,96}", "a model name (1 to 96 printable ASCII characters)")
# Compute slices where they are fewer than the GPU instance's, its slices, its memory, and its attributes.
PROFILE: Final = Format(
    r"(?:[1-9]c\.)?[1-9]g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})*){0,3}",
    "a MIG profile (1g.10gb, 1c.3g.40gb, 1g.10gb+me)",
)
# Nodes below /dev/dri that programs open. A card's folder in sysfs holds its connectors too.
DRM_NAME: Final = Format("(?:card|renderD)[0-9]{1,5}", "the name of a DRM node (card0, renderD128)")
# In the kernel's syntax; at most one page of sysfs.
CPULIST: Final = Format(
    r"(?=.{0,4096}\Z)[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*", 'a list of CPUs ("0-15,32-47")'
)

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
ADDRESSING: Final = ("none", "hmm", "ats")
PCIE_PATHS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")  # as `nvidia-smi topo -m` names them, nearest first

UNKNOWN_MODEL: Final = "unknown"  # of a GPU that NVML cannot describe
UNKNOWN_PROFILE: Final = "unknown"  # of a MIG device that NVML cannot describe

# Numbers of device nodes that the driver fixes (NVIDIA/open-gpu-kernel-modules
# kernel-open/common/inc/nv-chardev-numbers.h). Its other majors are dynamic, and a simulated node may have any.
NVIDIA_MAJOR: Final = 195  # assigned to NVIDIA (Linux: Documentation/admin-guide/devices.txt)
GPU_INDEX_MAX: Final = 247  # /dev/nvidia0 to 247; those up to 253 are reserved
MODESET_MINOR: Final = 254
NVIDIACTL_MINOR: Final = 255
DRIVER_GPUS_MAX: Final = 32  # NV_MAX_DEVICES, as many as the driver serves
NVLINKS_MAX: Final = 36  # NVML_NVLINK_MAX_LINKS

GpuIndex = Annotated[int, Meta(ge=0, le=GPU_INDEX_MAX)]
NvlinkCount = Annotated[int, Meta(ge=0, le=NVLINKS_MAX)]
DeviceMajor = Annotated[int, Meta(ge=1, le=2**12 - 1)]  # 12 bits (linux/kdev_t.h)
DeviceMinor = Annotated[int, Meta(ge=0, le=2**20 - 1)]  # 20 bits
NumaNumber = Annotated[int, Meta(ge=0, le=1023)]  # MAX_NUMNODES
NvmlCode = Annotated[int, Meta(ge=0, le=999)]  # NVML_ERROR_UNKNOWN
STARTED_MAX: Final = 1024
Started = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...], Meta(max_length=STARTED_MAX)]
Pids = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**31 - 1)], ...], Meta(max_length=STARTED_MAX)]
ProcessCount = Annotated[int, Meta(ge=0, le=2**22)]  # of a whole machine (Linux: PID_MAX_LIMIT)
Uint = Annotated[int, Meta(ge=0, le=2**32 - 1)]
EngineCount = Annotated[int, Meta(ge=0, le=65535)] | None
MigNumber = Annotated[int, Meta(ge=0, le=1023)]  # far more than a GPU has instances
ArchNumber = Annotated[int, Meta(ge=0, le=99)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def profile_in(name: str) -> str:
    """Return the profile in a MIG device's name, `NVIDIA A100-SXM4-40GB MIG 1g.5gb`, or empty if there is none."""
    last = name.rpartition(" MIG ")[2].lower()
    return PROFILE.or_empty(last) if " MIG " in name else ""


def compute_prohibited(bus_id: str) -> str:
    """Say why a GPU in compute mode `prohibited` cannot be granted, and what to do about it."""
    return f"its compute mode is prohibited, so no program can compute on it: run `nvidia-smi -i {bus_id} -c 0`"
