"""GPUs and MIG devices as NVML describes them, and how MIG profiles are written (`1g.10gb`, `1c.3g.40gb`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import combinations
from typing import Annotated, ClassVar, Final, NewType

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from nri_gpu.domain import bounds
from nri_gpu.domain.health import WELL, Health, RecoveryAction, Sign
from nri_gpu.domain.value import Recorded, Value


def is_compute_slice(profile: str) -> bool:
    """Return whether it is a part of a GPU instance, as `1c.3g.40gb` is; device plugins do not offer those."""
    return profile[1:3] == "c."


def slices(profile: str) -> tuple[int, int]:
    """Return the slices of the GPU instance, and of the compute instance in it."""
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


def parse_bus_id(text: str) -> PciBusId:
    """Return a PCI address in our spelling. Raises: ValueError."""
    return spelled(bounds.BUS_ID.parse(text.lower()))


def gpu_names(word: str) -> frozenset[str]:
    """Return what a word for a GPU may be: its UUID or index, and its PCI address in our spelling."""
    try:
        return frozenset({word, parse_bus_id(word)})
    except ValueError:
        return frozenset({word})


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

# These do not work alone: decoding runs on CUDA, and a display shows what was drawn. As in NVIDIA/libnvidia-container
# (src/options.h: video takes all compute libraries, display all of graphics).
_BRINGS: Final[Mapping[Capability, Capability]] = {
    Capability.VIDEO: Capability.COMPUTE,
    Capability.DISPLAY: Capability.GRAPHICS,
}


def closure(capabilities: Capabilities) -> Capabilities:
    """Add the capabilities that these bring along. Files, nodes and policy use only closed sets."""
    return capabilities | {_BRINGS[each] for each in capabilities if each in _BRINGS}


def closed_sets() -> Iterator[Capabilities]:
    """Return every set that `closure` can give for a request, the smallest first."""
    every = tuple(Capability)
    subsets = (frozenset(some) for size in range(1, len(every) + 1) for some in combinations(every, size))
    return (some for some in subsets if closure(some) == some)


class DrmNode(Recorded, frozen=True):
    """A node of the kernel's graphics interface that belongs to a GPU; there while nvidia-drm is loaded.

    name: `card1` or `renderD128`, as below /dev/dri.
    """

    name: Annotated[str, bounds.DRM_NAME.meta()]
    major: bounds.DeviceMajor
    minor: bounds.DeviceMinor


class ComputeMode(StrEnum):
    """The number of programs that may compute on a GPU at once, as `nvidia-smi -c` sets it."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive-thread"  # of old drivers
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive-process"  # an MPS daemon's GPU has it too


class Ecc(Recorded, frozen=True):
    """The correction of memory errors. pending: from the GPU's next reset on."""

    current: bool
    pending: bool


class FabricState(StrEnum):
    """The progress of a GPU in joining its NVLink fabric."""

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
    status: bounds.Uint = 0
    cluster: Annotated[str, bounds.CLUSTER_UUID.meta("")] = ""
    clique: bounds.Uint = 0
    health_mask: bounds.Uint | None = None


class MigEngines(Recorded, frozen=True):
    """The engines that a MIG device has of its GPU (nvmlDeviceGetAttributes_v2); None where NVML does not tell."""

    multiprocessors: bounds.EngineCount = None
    copy_engines: bounds.EngineCount = None
    decoders: bounds.EngineCount = None
    encoders: bounds.EngineCount = None
    jpeg_engines: bounds.EngineCount = None
    ofa_engines: bounds.EngineCount = None


def _forget_zeros(unit: MigDevice | Gpu) -> None:
    """Make an unknown number None: 0.1.0 recorded it as 0, and topology files may say so."""
    for name, zero in (("memory_bytes", 0), ("arch", (0, 0))):
        if getattr(unit, name, None) == zero:
            force_setattr(unit, name, None)


class Cordon(Recorded, frozen=True):
    """A word of root's that took a GPU out of use, and its MIG devices with it.

    given: what has the unit from before, and keeps it: UIDs of pods and of claims, ids of sandboxes, and devices of the
    kubelet by `reservation_id`. unknown: nobody can tell whether root took it out of use.
    """

    given: frozenset[str] = frozenset()
    unknown: bool = False


class MigDescription(Recorded, frozen=True, kw_only=True):
    """A MIG device as NVML describes it, and a topology file in the same words."""

    uuid: Annotated[GpuUuid, bounds.MIG_UUID.meta()]  # a new one each time the instance is made
    gpu_instance_id: bounds.MigNumber
    compute_instance_id: bounds.MigNumber
    profile: Annotated[str, bounds.PROFILE.meta(bounds.UNKNOWN_PROFILE)]  # as `nvidia-smi -L` writes it, lower case
    memory_bytes: bounds.Bytes | None = None  # of its GPU instance (nvmlDeviceGetAttributes_v2); None where unknown
    unavailable: str = ""  # why it cannot be granted; empty when it can
    processes: bounds.ProcessCount | None = None  # this and the next as a `Gpu`'s
    engines: MigEngines = MigEngines()
    placement: bounds.MigNumber | None = None  # first memory slice of its GPU instance (nvmlGpuInstanceGetInfo)


class MigDevice(MigDescription, Value, frozen=True, kw_only=True):
    """A MIG device of a GPU in MIG mode: a compute instance inside a GPU instance.

    index: its place in NVML's list, the j of `i:j`; not an id: it moves when an instance is removed.
    """

    aside: ClassVar = ("processes", "started", "pids")

    index: bounds.MigNumber
    gpu_instance_minor: bounds.DeviceMinor | None = None  # of its nodes /dev/nvidia-caps/nvidia-capN; None: not known
    compute_instance_minor: bounds.DeviceMinor | None = None
    started: bounds.Started = ()
    pids: bounds.Pids = ()
    health: Health = WELL  # its own, from what NVML says of this device alone
    cordon: Cordon | None = None  # None while its GPU is in use

    def __post_init__(self) -> None:
        _forget_zeros(self)


class GpuDescription(Recorded, frozen=True, kw_only=True):
    """A GPU as NVML and the kernel describe it, and a topology file in the same words.

    A fact that they do not tell is None, or empty.
    """

    index: bounds.GpuIndex  # NVML's, in PCI order; not an id: it moves when a GPU is lost
    minor_number: bounds.GpuIndex  # N of /dev/nvidiaN (nvmlDeviceGetMinorNumber); differs from the index on some hosts
    uuid: Annotated[GpuUuid, bounds.UUID.meta()]
    pci_bus_id: Annotated[PciBusId, bounds.BUS_ID.meta()]  # domain of 4 digits where it fits: `0000:3b:00.0`
    model: Annotated[str, bounds.MODEL.meta()]
    memory_bytes: bounds.Bytes | None = None  # framebuffer (nvmlDeviceGetMemoryInfo); None for a GPU that has none
    numa_node: bounds.NumaNumber | None = None
    brand: str = ""  # nvmlDeviceGetBrand as a word, `nvidia`
    unavailable: str = ""  # why it cannot be granted; empty when it can
    # How many had it open at that moment (nvmlDeviceGetComputeRunningProcesses and ...Graphics...).
    processes: bounds.ProcessCount | None = None
    architecture: Annotated[str, bounds.one_of(["", *bounds.ARCHITECTURES.values()])] = ""  # `hopper`
    cpus: Annotated[str, bounds.CPULIST.meta("")] = ""  # nearest to it
    compute_mode: ComputeMode | None = None
    persistence: bool | None = None
    addressing: Annotated[str, bounds.one_of(["", *bounds.ADDRESSING])] = ""
    fabric: Fabric | None = None
    pcie_root: Annotated[str, bounds.PCIE_ROOT.meta("")] = ""  # of its PCI tree: `pci0000:c9`
    remap_pending: bool | None = None  # whether a row of its memory is replaced at its next reset
    recovery_action: RecoveryAction | None = None  # what the driver wants done about it


class Gpu(GpuDescription, Value, frozen=True, kw_only=True):
    """A physical GPU as NVML described it when its `Node` was taken.

    An MPS daemon that we start changes the compute mode, so that does not count in comparisons; nor do processes, which
    change all the time. A GPU on which the mode prohibits all programs is `unavailable`.
    """

    aside: ClassVar = ("processes", "started", "pids", "compute_mode")

    arch: tuple[bounds.ArchNumber, bounds.ArchNumber] | None = None  # compute capability, (9, 0) for Hopper
    mig_enabled: bool = False
    mig: Annotated[tuple[MigDevice, ...], Meta(max_length=1024)] = ()  # in NVML's order; MIG mode needs none
    drm: Annotated[tuple[DrmNode, ...], Meta(max_length=64)] = ()  # card and render nodes, if nvidia-drm is loaded
    started: bounds.Started = ()  # when those processes started whose PIDs can be seen, clock ticks since boot
    pids: bounds.Pids = ()  # theirs, in the same order
    signs: Annotated[tuple[Sign, ...], Meta(max_length=len(Sign))] = ()  # what else the query showed, for `health/`
    health: Health = WELL  # what follows from signs and events
    ecc: Ecc | None = None
    cordon: Cordon | None = None  # None while it is in use

    def __post_init__(self) -> None:
        _forget_zeros(self)

    @property
    def arch_text(self) -> str:
        """Return `9.0`, or empty if it is unknown."""
        return "{}.{}".format(*self.arch) if self.arch else ""

    @property
    def parts(self) -> tuple[MigPart, ...]:
        """Return the GPU's MIG devices, each with this GPU."""
        return tuple(MigPart(self, device) for device in self.mig)

    @property
    def place(self) -> str:
        """Return NVML's index: `0`."""
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
    def place(self) -> str:
        """Return NVML's indices of GPU and MIG device: `0:1`."""
        return f"{self.gpu.index}:{self.device.index}"


# Compute slices of GPUs whose largest MIG profile is 4g (NVML_GPU_INSTANCE_PROFILE_4_SLICE); all others have seven.
_FOUR_SLICES: Final = ("A30", "RTX PRO")


def compute_share(unit: Unit) -> float:
    """Return which part of its GPU's compute slices a unit has: 1.0 for a whole GPU."""
    if isinstance(unit, Gpu):
        return 1.0
    total = 4 if any(each in unit.model for each in _FOUR_SLICES) else 7
    profile = unit.device.profile
    return min(1.0, (1 if profile == bounds.UNKNOWN_PROFILE else slices(profile)[1]) / total)


Unit = Gpu | MigPart  # what can be granted: one has a UUID, and at most one mode at a time


def described(unit: Unit) -> Gpu | MigDevice:
    """Return what NVML says of the unit itself."""
    return unit.device if isinstance(unit, MigPart) else unit


def whole(unit: Unit) -> Gpu:
    """Return the GPU itself, or the GPU that a MIG device is a part of."""
    return unit.gpu if isinstance(unit, MigPart) else unit


def gpus_of(units: Iterable[Unit]) -> tuple[Gpu, ...]:
    """Return each unit's GPU, in the order of the units: MIG devices of one GPU give it more than once."""
    return tuple(map(whole, units))


def health_of(unit: Unit) -> Health:
    """Return the unit's health: a MIG device has its GPU's, unless its own is worse."""
    if isinstance(unit, Gpu):
        return unit.health
    return max(unit.gpu.health, unit.device.health, key=lambda health: (health.severity, health.changes))


def nvml_order(unit: Unit) -> tuple[int, int]:
    """Return a key to sort by: a GPU before its MIG devices."""
    return (unit.gpu.index, unit.device.index) if isinstance(unit, MigPart) else (unit.index, -1)
