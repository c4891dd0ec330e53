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
    """A GPU that exists but could not be described: lost, no permission, call failed.

    reason: one sentence naming the NVML call and its error. code: that error's number, 0 where the answer was
    unreadable. sign: what it means for the GPU's health; None: nothing. uuid, pci_bus_id: as far as they are known;
    else empty.
    """

    index: bounds.GpuIndex
    reason: str
    code: bounds.NvmlCode = 0
    sign: Sign | None = None
    uuid: Annotated[str, bounds.UUID.meta("")] = ""
    pci_bus_id: Annotated[str, bounds.BUS_ID.meta("")] = ""


class KernelGpu(Recorded, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A GPU that the kernel shows and NVML does not list: it is reported and never granted.

    uuid, model, minor_number: as the driver told the kernel, else empty or None. reason: a clause. given: false for a
    GPU of the host that this machine, itself a container, was not given, which is no fault. No decision depends on it,
    so what a newer version says of it may be left out.
    """

    pci_bus_id: PciBusId
    reason: str
    uuid: str = ""
    model: str = ""
    minor_number: int | None = None
    given: bool = True


class Link(Recorded, frozen=True):
    """How two GPUs (NVML indices a < b) reach each other.

    pcie: the common ancestor in the words of `nvidia-smi topo -m` (PIX, PXB, PHB, NODE, SYS).
    nvlink: number of direct NVLink connections, 0 for none.
    """

    a: bounds.GpuIndex
    b: bounds.GpuIndex
    pcie: Annotated[str, bounds.one_of(bounds.PCIE_PATHS)]
    nvlink: bounds.NvlinkCount = 0


class NumaNode(Recorded, frozen=True):
    """One NUMA node of the host that a GPU is nearest to.

    cpus: its CPUs in the kernel's list syntax, `0-15,32-47`; empty when it has none. memory: whether it has any.
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
    """The driver's files for one set of capabilities, staged as a folder that is mounted whole.

    path: host folder with `lib64/` (files and real symlinks under every name), `lib64/bin/`, in a tree with compat32
    `lib64/lib32/`, and links `bin` and `lib32` to these: so either it or its `lib64` alone can be mounted. binaries:
    names in `lib64/bin/`. files: (place in the container, path in the tree) of what programs look for in other
    places: configuration, and modules for programs of the image. libraries, libraries_32: (path in the
    tree, every name that programs ask for it by).
    """

    path: str
    binaries: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, tuple[str, ...]], ...] = ()
    libraries_32: tuple[tuple[str, tuple[str, ...]], ...] = ()


class DriverFiles(Recorded, frozen=True):
    """The host driver's user space, staged once per generation.

    version: as in the files' names, `580.95.05`. generation: names the staged folder; changes whenever a file does.
    trees: one for each closed set of capabilities; sets that come to the same files share one.
    missing: capability -> libraries a current driver has and this one lacks; for people, not for decisions.
    lacks: capability that this driver cannot serve -> the libraries of which it would need one: `libcuda.so`. What such
    a capability brings along is not repeated. host_binaries: programs that the daemon runs, staged beside the trees,
    where not all of them run in containers; else empty.
    """

    version: str
    generation: str
    trees: Mapping[Capabilities, DriverTree]
    missing: Mapping[Capability, tuple[str, ...]]
    lacks: Mapping[Capability, str] = {}
    host_binaries: tuple[str, ...] = ()


class Inventory(Recorded, frozen=True, kw_only=True):
    """The GPUs as one source describes them: NVML, or a topology file.

    fault: why nothing can be granted at all (no driver, version mismatch); empty when something can.
    taken_at: seconds since the boot, on CLOCK_BOOTTIME.
    driver_version, cuda_version: empty when unknown; `580.95.05`, `13.0`.
    numa: the nodes that GPUs are nearest to, as far as the host tells.
    simulated: a topology file's node; its majors come from the file.
    extras: what the node has of each extra that needs more than the GPUs; an extra that is missing was not searched.
    script: what will happen to a simulated node.
    modules: version of each of the driver's kernel modules that is loaded, by the kernel's names (`nvidia_uvm`).
    unlisted: GPUs that the kernel alone knows of.
    nvswitches: as the driver counts them on this machine; HGX B200 and NVL72 show none.
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
    extras: Mapping[Extra, NodeExtra] = field(default_factory=dict)
    script: tuple[ScriptedEvent, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    unlisted: tuple[KernelGpu, ...] = ()
    nvswitches: int = 0

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


class Node(Recorded, frozen=True, kw_only=True):
    """One numbered snapshot of all that a decision needs to know of the node.

    number: grows by one with each snapshot published. driver: None until the driver's files are staged;
    driver_fault then says why, or what it waits for. module_version: of the loaded kernel module, as the kernel shows
    it; empty when it was unloaded, None when it was never loaded, or the node is simulated.
    compat: packages of a newer CUDA for this driver, the lowest CUDA first. mps: where each GPU's MPS
    daemon has its folder. inventory_age_s: seconds since the inventory was last confirmed; filled in only where policy
    needs it. hwcaps: whether loaders look into `glibc-hwcaps/x86-64-v2` on this CPU.
    """

    number: int
    inventory: Inventory
    driver: DriverFiles | None = None
    driver_fault: str = ""
    module_version: str | None = None
    compat: tuple[CompatPackage, ...] = ()
    mps: MpsFolders = MpsFolders()
    inventory_age_s: float = 0.0
    hwcaps: bool = True

    @property
    def generation(self) -> str:
        """The driver generation, `-` where there is none."""
        return self.driver.generation if self.driver else "-"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.inventory.gpus


CudaVersion = tuple[int, int]


class CompatPackage(Recorded, frozen=True, kw_only=True):
    """One package: a newer CUDA on top of the kernel module that is loaded.

    cuda: the CUDA version of its libcuda, (13, 0). version: of its libcuda, `580.65.06`.
    drivers: majors of the host drivers that its libcuda was made to run on; None where its file does not say.
    generation: names the staged folder; changes whenever a file does. path: that folder, with every library under its
    names.
    """

    cuda: CudaVersion
    version: str
    drivers: frozenset[int] | None
    generation: str
    path: str

    @property
    def cuda_version(self) -> str:
        """`13.0`."""
        return "{}.{}".format(*self.cuda)


class Loader(StrEnum):
    """Where the libraries are mounted, and whether LD_LIBRARY_PATH leads there; docs/loader.md says who is served."""

    FOLDERS = "folders"
    TREE = "tree"
    HWCAPS = "hwcaps"
    FILES = "files"
