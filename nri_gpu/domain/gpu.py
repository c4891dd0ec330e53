"""GPUs and the node they sit in, as somebody described them at one moment. Words are NVML's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from typing import ClassVar, Final, NewType

from msgspec import Struct, field

from nri_gpu.domain.compat import CompatPackage
from nri_gpu.domain.extras import Extra, Offer, Profiles
from nri_gpu.domain.health import WELL, Health, ScriptedEvent, Sign
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.domain.value import Value

GpuUuid = NewType("GpuUuid", str)
PciBusId = NewType("PciBusId", str)


class Capability(StrEnum):
    """What a container wants of the driver; the words of NVIDIA_DRIVER_CAPABILITIES."""

    COMPUTE = "compute"
    UTILITY = "utility"
    VIDEO = "video"
    GRAPHICS = "graphics"
    DISPLAY = "display"
    NGX = "ngx"
    COMPAT32 = "compat32"


Capabilities = frozenset[Capability]

DEFAULT_CAPABILITIES: Final[Capabilities] = frozenset({Capability.COMPUTE, Capability.UTILITY})

# What cannot work alone: decoding runs on CUDA, a screen shows what was drawn. As NVIDIA/libnvidia-container does it
# (src/options.h: video takes all compute libraries, display all of graphics).
_BRINGS: Final[Mapping[Capability, Capability]] = {
    Capability.VIDEO: Capability.COMPUTE,
    Capability.DISPLAY: Capability.GRAPHICS,
}


@lru_cache(maxsize=128)  # as many as there are
def closure(capabilities: Capabilities) -> Capabilities:
    """These capabilities and those they bring along. Files, nodes and policy only ever meet sets closed like this."""
    return capabilities | {_BRINGS[each] for each in capabilities if each in _BRINGS}


def closed_sets() -> Iterator[Capabilities]:
    """Every set that `closure` can give for a request, the smallest first."""
    every = tuple(Capability)
    subsets = (frozenset(some) for size in range(1, len(every) + 1) for some in combinations(every, size))
    return (some for some in subsets if closure(some) == some)


class DrmNode(Struct, frozen=True):
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


class Ecc(Struct, frozen=True):
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

    aside: ClassVar = ("health_mask",)  # bits come and go, and nothing is decided by them

    state: FabricState
    status: int = 0
    cluster: str = ""
    clique: int = 0
    health_mask: int | None = None


class MigDevice(Value, frozen=True, kw_only=True):
    """One MIG device of a GPU in MIG mode: a compute instance inside a GPU instance.

    index: its place in NVML's list, the j of `i:j`; not an id: it moves when an instance is removed.
    uuid: `MIG-...`; another one each time the instance is made.
    profile: as `nvidia-smi -L` writes it, lower case: `1g.10gb`, `1c.3g.40gb`, `1g.10gb+me`.
    memory_bytes: of its GPU instance, bytes (nvmlDeviceGetAttributes_v2).
    gpu_instance_minor, compute_instance_minor: of its capability nodes, /dev/nvidia-caps/nvidia-capN; None: not known.
    unavailable: why it cannot be granted; empty when it can.
    processes: as a `Gpu`'s. health: its own, of what NVML told of it alone.
    """

    aside: ClassVar = ("processes",)

    index: int
    uuid: GpuUuid
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    memory_bytes: int
    gpu_instance_minor: int | None = None
    compute_instance_minor: int | None = None
    unavailable: str = ""
    processes: int | None = None
    health: Health = WELL


class Gpu(Value, frozen=True, kw_only=True):
    """One physical GPU as NVML described it when its `Node` was taken.

    index: NVML enumeration index (PCI order); not an id: it moves when a GPU is lost.
    minor_number: N of /dev/nvidiaN (nvmlDeviceGetMinorNumber); differs from the index on some hosts.
    pci_bus_id: lower case, 4-digit domain where it fits: `0000:3b:00.0`.
    memory_bytes: total framebuffer, bytes (nvmlDeviceGetMemoryInfo).
    arch: compute capability, (9, 0) for Hopper (nvmlDeviceGetCudaComputeCapability).
    numa_node: None where the host does not tell.
    mig: its MIG devices in NVML's order; a GPU in MIG mode can have none.
    brand: nvmlDeviceGetBrand as a word, `nvidia`; empty where nobody told.
    unavailable: why it cannot be granted; empty when it can.
    drm: its card and render nodes; empty where nvidia-drm is not loaded.
    processes: how many had it open at that moment (nvmlDeviceGetComputeRunningProcesses and ...Graphics...); None where
    nobody could tell. Moves all the time, so it makes no other inventory of one.
    signs: what else the look showed, for `health/` and for people. health: what came of signs and events.
    architecture: nvmlDeviceGetArchitecture as a word, `hopper`. cpus: those nearest to it, in the kernel's list syntax.
    addressing: `hmm`, `ats` or `none`. These are empty, and the other facts None, where nobody told.
    compute_mode: an MPS daemon that we start changes it, so it makes no other inventory of one; a GPU on which it
    prohibits all programs is `unavailable`.
    """

    aside: ClassVar = ("processes", "compute_mode")

    index: int
    minor_number: int
    uuid: GpuUuid
    pci_bus_id: PciBusId
    model: str
    memory_bytes: int
    arch: tuple[int, int]
    numa_node: int | None = None
    mig_enabled: bool = False
    brand: str = ""
    unavailable: str = ""
    mig: tuple[MigDevice, ...] = ()
    drm: tuple[DrmNode, ...] = ()
    processes: int | None = None
    signs: tuple[Sign, ...] = ()
    health: Health = WELL
    architecture: str = ""
    cpus: str = ""
    compute_mode: ComputeMode | None = None
    persistence: bool | None = None
    ecc: Ecc | None = None
    addressing: str = ""
    fabric: Fabric | None = None

    def __hash__(self) -> int:
        """By identity alone: GPUs are part of keys in the hook path."""
        return hash(self.uuid)

    @property
    def parts(self) -> tuple[MigPart, ...]:
        """Its MIG devices, each with this GPU."""
        return tuple(MigPart(self, device) for device in self.mig)


class MigPart(Struct, frozen=True):
    """A MIG device and the GPU that it is a part of: granted, held and released like a GPU of its own."""

    gpu: Gpu
    device: MigDevice

    def __hash__(self) -> int:
        """By identity alone, as a GPU's."""
        return hash(self.device.uuid)

    @property
    def uuid(self) -> GpuUuid:
        """The MIG device's own."""
        return self.device.uuid

    @property
    def model(self) -> str:
        """The whole GPU's."""
        return self.gpu.model

    @property
    def memory_bytes(self) -> int:
        """The MIG device's own."""
        return self.device.memory_bytes

    @property
    def arch(self) -> tuple[int, int]:
        """The whole GPU's."""
        return self.gpu.arch

    @property
    def processes(self) -> int | None:
        """The MIG device's own."""
        return self.device.processes

    @property
    def place(self) -> str:
        """NVML's indices of GPU and MIG device: `0:1`."""
        return f"{self.gpu.index}:{self.device.index}"


Unit = Gpu | MigPart  # what can be granted: one has a UUID, and at most one mode at a time


def whole(unit: Unit) -> Gpu:
    """The GPU that it is, or is a part of."""
    return unit.gpu if isinstance(unit, MigPart) else unit


def health_of(unit: Unit) -> Health:
    """How it is: a MIG device is as its GPU is, unless it is worse by itself."""
    if isinstance(unit, Gpu):
        return unit.health
    return max(unit.gpu.health, unit.device.health, key=lambda health: (health.severity, health.changes))


def nvml_order(unit: Unit) -> tuple[int, int]:
    """To sort by: a GPU before its MIG devices."""
    return (unit.gpu.index, unit.device.index) if isinstance(unit, MigPart) else (unit.index, -1)


class GpuFault(Struct, frozen=True):
    """A GPU that is there but could not be described: lost, no permission, call failed.

    reason: one sentence naming the NVML call and its error. code: that error's number, 0 where the answer was
    unreadable. sign: what it says of the GPU's health; None: nothing. uuid, pci_bus_id: as far as they were told, or
    are known from before; empty where not.
    """

    index: int
    reason: str
    code: int = 0
    sign: Sign | None = None
    uuid: str = ""
    pci_bus_id: str = ""


class KernelGpu(Struct, frozen=True, kw_only=True):
    """A GPU that the kernel shows and NVML does not list: there to be named, never to be granted.

    uuid, model, minor_number: as the driver told the kernel, empty or None where it did not. reason: a sentence's end.
    """

    pci_bus_id: PciBusId
    reason: str
    uuid: str = ""
    model: str = ""
    minor_number: int | None = None


class Link(Struct, frozen=True):
    """How two GPUs (NVML indices a < b) reach each other.

    pcie: the common ancestor in the words of `nvidia-smi topo -m` (PIX, PXB, PHB, NODE, SYS).
    nvlink: number of direct NVLink connections, 0 for none.
    """

    a: int
    b: int
    pcie: str
    nvlink: int = 0


class NumaNode(Struct, frozen=True):
    """One NUMA node of the host that a GPU is nearest to.

    cpus: its CPUs in the kernel's list syntax, `0-15,32-47`; empty when it has none. memory: whether it has any.
    """

    number: int
    cpus: str
    memory: bool = True


class Majors(Struct, frozen=True):
    """Character device majors of the driver's kernel modules. None: that module is not loaded.

    modeset: whether nvidia-modeset is loaded, which shares nvidia's major; None: drivers before 545 do not tell.
    Source: /proc/devices (whole names), or a topology file for a simulated node.
    """

    nvidia: int | None = None
    nvidia_uvm: int | None = None
    nvidia_caps: int | None = None
    modeset: bool | None = None


class DriverTree(Struct, frozen=True):
    """The driver's files for one set of capabilities, staged as a folder that is mounted whole.

    path: host folder with `lib64/` (files and real symlinks under every name), `lib64/bin/`, in a tree with compat32
    `lib64/lib32/`, and links `bin` and `lib32` to these: so either it or its `lib64` alone can be mounted. binaries:
    names in `lib64/bin/`. files: (place in the container, path in the tree) of what programs look for where nothing
    else of the driver is: configuration, and modules of programs of the image. libraries, libraries_32: (path in the
    tree, every name that programs ask for it by).
    """

    path: str
    binaries: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, tuple[str, ...]], ...] = ()
    libraries_32: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __hash__(self) -> int:
        """By place alone: trees are part of keys in the hook path, and what is staged never changes."""
        return hash(self.path)


class DriverFiles(Struct, frozen=True):
    """The host driver's user space, staged once per generation.

    version: as in the files' names, `580.95.05`. generation: names the staged folder; changes whenever a file does.
    trees: one for each closed set of capabilities; sets that come to the same files share one.
    missing: capability -> libraries a current driver has and this one lacks; for people, not for decisions.
    """

    version: str
    generation: str
    trees: Mapping[Capabilities, DriverTree]
    missing: Mapping[Capability, tuple[str, ...]]


class Inventory(Struct, frozen=True, kw_only=True):
    """What one source (NVML, or a topology file) said of the GPUs.

    fault: why nothing can be granted at all (no driver, version mismatch); empty when something can.
    taken_at: seconds since the epoch. driver_version, cuda_version: empty when unknown; `580.95.05`, `13.0`.
    numa: the nodes that GPUs are nearest to, as far as the host tells.
    simulated: a topology file's node; its majors come from the file.
    extras: what the node has of each extra that is not made of the GPUs alone; one that is left out was not looked for.
    script: what will happen to a simulated node.
    modules: version of each of the driver's kernel modules that is loaded, by the kernel's names (`nvidia_uvm`).
    unlisted: GPUs that the kernel alone knows of.
    """

    taken_at: float
    gpus: tuple[Gpu, ...] = ()
    faults: tuple[GpuFault, ...] = ()
    links: tuple[Link, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    majors: Majors = Majors()
    driver_version: str = ""
    cuda_version: str = ""
    fault: str = ""
    simulated: bool = False
    extras: Mapping[Extra, Offer] = field(default_factory=dict)
    script: tuple[ScriptedEvent, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    unlisted: tuple[KernelGpu, ...] = ()

    def __hash__(self) -> int:
        """By its moment alone: inventories are part of keys in the hook path."""
        return hash(self.taken_at)

    @property
    def parts(self) -> tuple[MigPart, ...]:
        """All MIG devices, in NVML order."""
        return tuple(part for gpu in self.gpus for part in gpu.parts)

    @property
    def units(self) -> tuple[Unit, ...]:
        """GPUs and MIG devices in NVML order, whether they can be granted or not."""
        found: list[Unit] = []
        for gpu in self.gpus:
            found += (gpu, *gpu.parts)
        return tuple(found)


class Node(Struct, frozen=True, kw_only=True):
    """One numbered snapshot of all that a decision needs to know of the machine.

    number: grows by one with each snapshot published. driver: None until the driver's files are staged;
    driver_fault then says why, or what it waits for. module_version: of the kernel module that is loaded, asked of the
    kernel and not of NVML; empty when it was loaded and is no more, None when it never was, or the node is simulated.
    compat: packages of a newer CUDA for this driver, the lowest CUDA first. profiles: application profiles that lie
    ready; None before they were written. mps: where each GPU's MPS daemon has its folder. inventory_age_s: seconds
    since the inventory was last confirmed; filled in by the shell where policy asks for it.
    """

    number: int
    inventory: Inventory
    driver: DriverFiles | None = None
    driver_fault: str = ""
    module_version: str | None = None
    compat: tuple[CompatPackage, ...] = ()
    profiles: Profiles | None = None
    mps: MpsFolders = MpsFolders()
    inventory_age_s: float = 0.0

    @property
    def generation(self) -> str:
        """The driver generation, `-` where there is none."""
        return self.driver.generation if self.driver else "-"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs in NVML order."""
        return self.inventory.gpus
