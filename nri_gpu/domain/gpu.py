"""GPUs and MIG devices as NVML describes them, and how MIG profiles are written (`1g.10gb`, `1c.3g.40gb`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import combinations
from typing import ClassVar, Final, NewType

from msgspec import Struct
from msgspec.structs import force_setattr

from nri_gpu.domain.health import WELL, Health, RecoveryAction, Sign
from nri_gpu.domain.value import Recorded, Value

# Compute slices where they are fewer than the GPU instance's, its slices, its memory, and its attributes.
MIG_PROFILE: Final = re.compile(r"(?:[1-9]c\.)?[1-9]g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})*){0,3}")


def is_compute_slice(profile: str) -> bool:
    """Whether it is a part of a GPU instance, as `1c.3g.40gb` is; device plugins do not offer those."""
    return profile[1:3] == "c."


def slices(profile: str) -> tuple[int, int]:
    """The slices of the GPU instance, and of the compute instance in it."""
    compute, _, rest = profile.partition("c.") if is_compute_slice(profile) else ("", "", profile)
    of_gpu = int(rest.partition("g.")[0])
    return of_gpu, int(compute or of_gpu)


GpuUuid = NewType("GpuUuid", str)
PciBusId = NewType("PciBusId", str)


def spelled(bus_id: str) -> PciBusId:
    """Spell a PCI address as everywhere here: lower case, a domain of four digits where that is enough.

    NVML and nvidia-smi write eight digits, in upper case; the kernel as many as it needs, on Hyper-V and VMD five.
    """
    domain, _, rest = bus_id.lower().partition(":")
    return PciBusId(f"{int(domain, 16):04x}:{rest}")


class Capability(StrEnum):
    """Parts of the driver that a container asks for, in the words of NVIDIA_DRIVER_CAPABILITIES."""

    COMPUTE = "compute"
    UTILITY = "utility"
    VIDEO = "video"
    GRAPHICS = "graphics"
    DISPLAY = "display"
    NGX = "ngx"
    COMPAT32 = "compat32"


Capabilities = frozenset[Capability]

DEFAULT_CAPABILITIES: Final[Capabilities] = frozenset({Capability.COMPUTE, Capability.UTILITY})

# What does not work alone: decoding runs on CUDA, and a display shows what was drawn. As in NVIDIA/libnvidia-container
# (src/options.h: video takes all compute libraries, display all of graphics).
_BRINGS: Final[Mapping[Capability, Capability]] = {
    Capability.VIDEO: Capability.COMPUTE,
    Capability.DISPLAY: Capability.GRAPHICS,
}


def closure(capabilities: Capabilities) -> Capabilities:
    """These capabilities and those they bring along. Files, nodes and policy use only closed sets."""
    return capabilities | {_BRINGS[each] for each in capabilities if each in _BRINGS}


def closed_sets() -> Iterator[Capabilities]:
    """Every set that `closure` can give for a request, the smallest first."""
    every = tuple(Capability)
    subsets = (frozenset(some) for size in range(1, len(every) + 1) for some in combinations(every, size))
    return (some for some in subsets if closure(some) == some)


class DrmNode(Recorded, frozen=True):
    """One node of the kernel's graphics interface that belongs to a GPU; there while nvidia-drm is loaded.

    name: `card1` or `renderD128`, as below /dev/dri.
    """

    name: str
    major: int
    minor: int


class ComputeMode(StrEnum):
    """How many programs may compute on a GPU at once, as `nvidia-smi -c` sets it."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive-thread"  # of old drivers
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive-process"  # an MPS daemon's GPU has it too


class Ecc(Recorded, frozen=True):
    """Whether memory errors are corrected. pending: from the GPU's next reset on."""

    current: bool
    pending: bool


class FabricState(StrEnum):
    """How far a GPU is in joining its NVLink fabric."""

    NOT_STARTED = "not-started"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"


class Fabric(Value, frozen=True):
    """A GPU's place in an NVLink fabric (nvmlDeviceGetGpuFabricInfoV).

    status: NVML's return code of the joining, 0 for success. cluster: a UUID, all zero before it joined.
    health_mask: None where the driver's call has none.
    """

    aside: ClassVar = ("health_mask",)  # bits change often, and no decision depends on them

    state: FabricState
    status: int = 0
    cluster: str = ""
    clique: int = 0
    health_mask: int | None = None


class MigEngines(Recorded, frozen=True):
    """What a MIG device has of its GPU, besides memory (nvmlDeviceGetAttributes_v2); None where NVML does not tell."""

    multiprocessors: int | None = None
    copy_engines: int | None = None
    decoders: int | None = None
    encoders: int | None = None
    jpeg_engines: int | None = None
    ofa_engines: int | None = None


def _forget_zeros(unit: MigDevice | Gpu) -> None:
    """Make an unknown number None: 0.1.0 recorded it as 0, and topology files may say so."""
    for name, zero in (("memory_bytes", 0), ("arch", (0, 0))):
        if getattr(unit, name, None) == zero:
            force_setattr(unit, name, None)


class MigDevice(Value, frozen=True, kw_only=True):
    """One MIG device of a GPU in MIG mode: a compute instance inside a GPU instance.

    index: its place in NVML's list, the j of `i:j`; not an id: it moves when an instance is removed.
    uuid: `MIG-...`; another one each time the instance is made.
    profile: as `nvidia-smi -L` writes it, lower case: `1g.10gb`, `1c.3g.40gb`, `1g.10gb+me`.
    memory_bytes: of its GPU instance, bytes (nvmlDeviceGetAttributes_v2); None where NVML does not tell, and for 0.
    gpu_instance_minor, compute_instance_minor: of its capability nodes, /dev/nvidia-caps/nvidia-capN; None: not known.
    unavailable: why it cannot be granted; empty when it can.
    processes, started, pids: as a `Gpu`'s. health: its own, from what NVML says of this device alone.
    """

    aside: ClassVar = ("processes", "started", "pids")

    index: int
    uuid: GpuUuid
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    memory_bytes: int | None = None
    gpu_instance_minor: int | None = None
    compute_instance_minor: int | None = None
    unavailable: str = ""
    processes: int | None = None
    started: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    health: Health = WELL
    engines: MigEngines = MigEngines()

    def __post_init__(self) -> None:
        _forget_zeros(self)


class Gpu(Value, frozen=True, kw_only=True):
    """One physical GPU as NVML described it when its `Node` was taken.

    index: NVML enumeration index (PCI order); not an id: it moves when a GPU is lost.
    minor_number: N of /dev/nvidiaN (nvmlDeviceGetMinorNumber); differs from the index on some hosts.
    pci_bus_id: lower case, 4-digit domain where it fits: `0000:3b:00.0`.
    memory_bytes: total framebuffer, bytes (nvmlDeviceGetMemoryInfo); None for a GPU that has none of its own.
    arch: compute capability, (9, 0) for Hopper (nvmlDeviceGetCudaComputeCapability).
    numa_node: None where the host does not tell.
    mig: its MIG devices in NVML's order; a GPU in MIG mode can have none.
    brand: nvmlDeviceGetBrand as a word, `nvidia`; empty where NVML does not tell.
    unavailable: why it cannot be granted; empty when it can.
    drm: its card and render nodes; empty where nvidia-drm is not loaded.
    processes: how many had it open at that moment (nvmlDeviceGetComputeRunningProcesses and ...Graphics...); None where
    NVML cannot tell. started: when those of them started that can be seen by NVML's PIDs, in clock ticks since boot.
    pids: theirs, in the same order. These change all the time, so they do not count when inventories are compared.
    signs: what else the query showed, for `health/` and for people. health: what follows from signs and events.
    architecture: nvmlDeviceGetArchitecture as a word, `hopper`. cpus: those nearest to it, in the kernel's list syntax.
    remap_pending: whether a row of its memory is replaced at its next reset. recovery_action: what the driver wants
    done about it. addressing: `hmm`, `ats` or `none`. pcie_root: of its PCI tree, `pci0000:c9`. These are
    empty, and the other facts None, where NVML or the kernel does not tell.
    compute_mode: an MPS daemon that we start changes it, so it does not count in comparisons; a GPU on which it
    prohibits all programs is `unavailable`.
    """

    aside: ClassVar = ("processes", "started", "pids", "compute_mode")

    index: int
    minor_number: int
    uuid: GpuUuid
    pci_bus_id: PciBusId
    model: str
    memory_bytes: int | None = None
    arch: tuple[int, int] | None = None
    numa_node: int | None = None
    mig_enabled: bool = False
    brand: str = ""
    unavailable: str = ""
    mig: tuple[MigDevice, ...] = ()
    drm: tuple[DrmNode, ...] = ()
    processes: int | None = None
    started: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    signs: tuple[Sign, ...] = ()
    health: Health = WELL
    architecture: str = ""
    cpus: str = ""
    compute_mode: ComputeMode | None = None
    persistence: bool | None = None
    ecc: Ecc | None = None
    addressing: str = ""
    fabric: Fabric | None = None
    pcie_root: str = ""
    remap_pending: bool | None = None
    recovery_action: RecoveryAction | None = None

    def __post_init__(self) -> None:
        _forget_zeros(self)

    @property
    def arch_text(self) -> str:
        """`9.0`; empty where it is unknown."""
        return "{}.{}".format(*self.arch) if self.arch else ""

    @property
    def parts(self) -> tuple[MigPart, ...]:
        """Its MIG devices, each with this GPU."""
        return tuple(MigPart(self, device) for device in self.mig)

    @property
    def place(self) -> str:
        """NVML's index: `0`."""
        return str(self.index)


class MigPart(Struct, frozen=True):
    """A MIG device and the GPU that it is a part of: granted, held and released like a whole GPU."""

    gpu: Gpu
    device: MigDevice

    @property
    def uuid(self) -> GpuUuid:
        return self.device.uuid

    @property
    def model(self) -> str:
        return self.gpu.model

    @property
    def memory_bytes(self) -> int | None:
        return self.device.memory_bytes

    @property
    def arch(self) -> tuple[int, int] | None:
        return self.gpu.arch

    @property
    def processes(self) -> int | None:
        return self.device.processes

    @property
    def started(self) -> tuple[int, ...]:
        return self.device.started

    @property
    def pids(self) -> tuple[int, ...]:
        return self.device.pids

    @property
    def place(self) -> str:
        """NVML's indices of GPU and MIG device: `0:1`."""
        return f"{self.gpu.index}:{self.device.index}"


Unit = Gpu | MigPart  # what can be granted: one has a UUID, and at most one mode at a time


def whole(unit: Unit) -> Gpu:
    """The GPU itself, or the GPU that a MIG device is a part of."""
    return unit.gpu if isinstance(unit, MigPart) else unit


def health_of(unit: Unit) -> Health:
    """Its health: a MIG device has its GPU's, unless its own is worse."""
    if isinstance(unit, Gpu):
        return unit.health
    return max(unit.gpu.health, unit.device.health, key=lambda health: (health.severity, health.changes))


def nvml_order(unit: Unit) -> tuple[int, int]:
    """To sort by: a GPU before its MIG devices."""
    return (unit.gpu.index, unit.device.index) if isinstance(unit, MigPart) else (unit.index, -1)
