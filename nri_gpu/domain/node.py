"""The node: its inventory, the driver's files, and one numbered snapshot of all of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import field

from nri_gpu.domain import bounds
from nri_gpu.domain.edits import Extra, NodeExtra
from nri_gpu.domain.gpu import Capabilities, Capability, Gpu, MigPart, PciBusId, Unit
from nri_gpu.domain.health import ScriptedEvent, Sign
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.domain.value import Recorded


class GpuFault(Recorded, frozen=True):
    """A GPU that exists but could not be described: lost, no permission, call failed."""

    index: bounds.GpuIndex
    reason: str  # one sentence naming the NVML call and its error
    code: bounds.NvmlCode = 0  # that error's number, or 0 if the answer was unreadable
    sign: Sign | None = None  # what the fault means for the GPU's health, or None
    uuid: Annotated[str, bounds.UUID.meta("")] = ""  # empty if unknown
    pci_bus_id: Annotated[str, bounds.BUS_ID.meta("")] = ""  # empty if unknown


class KernelGpu(Recorded, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A GPU that the kernel shows and NVML does not list: it is reported and never granted.

    uuid, model, minor_number: as the driver told the kernel, else empty or None. reason: a clause. given: false for a
    GPU of the host that this machine, itself a container, was not given, which is no fault. set_aside: it is kept from
    NVML on purpose, bound to VFIO for a virtual machine or excluded by the driver's settings, which is none either. No
    decision depends on it, so what a newer version says of it may be left out.
    """

    pci_bus_id: PciBusId
    reason: str
    uuid: str = ""
    model: str = ""
    minor_number: int | None = None
    given: bool = True
    set_aside: bool = False

    @property
    def missing(self) -> bool:
        """Return whether NVML should list it."""
        return self.given and not self.set_aside


class Link(Recorded, frozen=True):
    """The way two GPUs (NVML indices a < b) reach each other.

    pcie: the common ancestor in the words of `nvidia-smi topo -m` (PIX, PXB, PHB, NODE, SYS). nvlink: number of direct
    NVLink connections, 0 for none.
    """

    a: bounds.GpuIndex
    b: bounds.GpuIndex
    pcie: Annotated[str, bounds.one_of(bounds.PCIE_PATHS)]
    nvlink: bounds.NvlinkCount = 0


class NumaNode(Recorded, frozen=True):
    """A NUMA node of the host that a GPU is nearest to.

    cpus: its CPUs in the kernel's list syntax, `0-15,32-47`, or empty. memory: whether it has any.
    """

    number: bounds.NumaNumber
    cpus: Annotated[str, bounds.CPULIST.meta("")]
    memory: bool = True


class Majors(Recorded, frozen=True):
    """Character device majors of the driver's kernel modules. None: that module is not loaded.

    modeset: whether nvidia-modeset is loaded, which shares nvidia's major; None: unknown, as with drivers before 545.
    Source: /proc/devices (whole names), or a topology file for a simulated node.
    """

    nvidia: bounds.DeviceMajor | None = None
    nvidia_uvm: bounds.DeviceMajor | None = None
    nvidia_caps: bounds.DeviceMajor | None = None
    modeset: bool | None = None


class DriverTree(Recorded, frozen=True):
    """The driver's files for one set of capabilities, staged as a folder that is mounted whole."""

    # Host folder with `lib64/` (files and real symlinks under every name), `lib64/bin/`, in a tree with compat32
    # `lib64/lib32/`, and links `bin` and `lib32` to these: so either it or its `lib64` alone can be mounted.
    path: str
    binaries: tuple[str, ...] = ()  # names in `lib64/bin/`
    # (place in the container, path in the tree) of what programs look for in other places: configuration, and modules
    # for programs of the image.
    files: tuple[tuple[str, str], ...] = ()
    # (path in the tree, every name that programs ask for it by).
    libraries: tuple[tuple[str, tuple[str, ...]], ...] = ()
    libraries_32: tuple[tuple[str, tuple[str, ...]], ...] = ()  # likewise


class DriverFiles(Recorded, frozen=True):
    """The host driver's user space, staged once per generation."""

    version: str  # as in the files' names, `580.95.05`
    generation: str  # names the staged folder; changes whenever a file does
    # One for each closed set of capabilities; sets that come to the same files share one.
    trees: Mapping[Capabilities, DriverTree]
    # Capability -> libraries a current driver has and this one lacks; for people, not for decisions.
    missing: Mapping[Capability, tuple[str, ...]]
    # Capability that this driver cannot serve -> the libraries of which it would need one: `libcuda.so`. What such a
    # capability brings along is not repeated.
    lacks: Mapping[Capability, str] = {}
    # Programs that the daemon runs, staged beside the trees if not all of them run in containers.
    host_binaries: tuple[str, ...] = ()


class Inventory(Recorded, frozen=True, kw_only=True):
    """The GPUs as one source describes them: NVML, or a topology file."""

    taken_at: float  # seconds since the boot, on CLOCK_BOOTTIME
    gpus: tuple[Gpu, ...] = ()
    faults: tuple[GpuFault, ...] = ()
    links: tuple[Link, ...] = ()
    numa: tuple[NumaNode, ...] = ()  # the nodes that GPUs are nearest to, as far as the host tells
    majors: Majors = Majors()
    driver_version: str = ""  # `580.95.05`, or empty if unknown
    cuda_version: str = ""  # `13.0`, or empty if unknown
    fault: str = ""  # why nothing can be granted at all (no driver, version mismatch), or empty
    simulated: bool = False  # a topology file's node; its majors come from the file
    # What the node has of each extra that needs more than the GPUs; a missing extra was not searched for.
    extras: Mapping[Extra, NodeExtra] = field(default_factory=dict)
    script: tuple[ScriptedEvent, ...] = ()  # what will happen to a simulated node
    # Version of each of the driver's kernel modules that is loaded, by the kernel's names (`nvidia_uvm`).
    modules: Mapping[str, str] = field(default_factory=dict)
    unlisted: tuple[KernelGpu, ...] = ()  # GPUs that the kernel alone knows of
    nvswitches: int = 0  # as the driver counts them on this machine; HGX B200 and NVL72 show none

    @property
    def parts(self) -> tuple[MigPart, ...]:
        """Return all MIG devices, in NVML order."""
        return tuple(part for gpu in self.gpus for part in gpu.parts)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Return GPUs and MIG devices in NVML order, whether they can be granted or not."""
        found: list[Unit] = []
        for gpu in self.gpus:
            found += (gpu, *gpu.parts)
        return tuple(found)


class Node(Recorded, frozen=True, kw_only=True):
    """A numbered snapshot of all that a decision needs to know of the node."""

    number: int  # grows by one with each snapshot published
    inventory: Inventory
    driver: DriverFiles | None = None  # None until the driver's files are staged
    driver_fault: str = ""  # why `driver` is None, or what it waits for
    # Of the loaded kernel module, as the kernel shows it; empty: it was unloaded; None: it was never loaded, or the
    # node is simulated.
    module_version: str | None = None
    compat: tuple[CompatPackage, ...] = ()  # packages of a newer CUDA for this driver, the lowest CUDA first
    mps: MpsFolders = MpsFolders()  # where each GPU's MPS daemon has its folder
    inventory_age_s: float = 0.0  # since the inventory was last confirmed; filled in only if policy needs it; seconds
    hwcaps: bool = True  # loaders look into `glibc-hwcaps/x86-64-v2` on this CPU

    @property
    def generation(self) -> str:
        """Return the driver generation, or `-` if there is none."""
        return self.driver.generation if self.driver else "-"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.inventory.gpus


CudaVersion = tuple[int, int]


class CompatPackage(Recorded, frozen=True, kw_only=True):
    """A CUDA compatibility package: a newer CUDA on top of the kernel module that is loaded."""

    cuda: CudaVersion  # the CUDA version of its libcuda, (13, 0)
    version: str  # of its libcuda, `580.65.06`
    # Majors of the host drivers that its libcuda was made to run on, or None if its file does not say.
    drivers: frozenset[int] | None
    generation: str  # names the staged folder; changes whenever a file does
    path: str  # that folder, with every library under its names

    @property
    def cuda_version(self) -> str:
        """Return `13.0`."""
        return "{}.{}".format(*self.cuda)


class Loader(StrEnum):
    """Places of the libraries, and whether LD_LIBRARY_PATH leads there; docs/loader.md says who is served."""

    FOLDERS = "folders"
    TREE = "tree"
    HWCAPS = "hwcaps"
    FILES = "files"
