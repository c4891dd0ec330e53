"""The kernel's view of a node, without NVML.

It has majors, NUMA nodes, GPUs on the PCI bus, the minors of MIG devices' capability nodes, and whether any changed.
"""

from __future__ import annotations

import os
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import ge
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.bounds import CPULIST, DRIVER_GPUS_MAX, GPU_INDEX_MAX, MODEL, UUID
from nri_gpu.domain.errors import InventoryError, fault_of
from nri_gpu.domain.gpu import Gpu, MigDevice, PciBusId, parse_bus_id
from nri_gpu.domain.node import KernelGpu, Majors, NumaNode
from nri_gpu.host.modules import CAP_MINOR_MAX, MODULES, decimal, driver_fields, read_majors, read_mig_minors
from nri_gpu.system.storage import boot_id, text_of

_MEMORY: Final = "MemTotal:"


class HostFolders(Struct, frozen=True, kw_only=True):
    """The folders of the host's files; tests put them elsewhere. driver: the root of the driver's user space."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    host: Path = Path("/")
    driver: Path = Path("/")

    def with_driver(self, root: Path, host_root: str) -> HostFolders:
        """Set the driver root. In a pod it also serves as the host's `/`, if the whole host is mounted there."""
        return replace(self, driver=root, host=root if host_root == "/" else self.host)


def host_majors(proc: Path) -> Majors:
    """Return the majors of this machine's driver modules.

    Nodes under /dev are not consulted: one left from before the driver was reloaded has the old major.

    Raises: InventoryError.
    """
    try:
        return read_majors((proc / "devices").read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InventoryError(f"cannot read the majors of the driver's devices: {fault_of(error)}") from error


def numa_nodes(gpus: Iterable[Gpu], sysfs: Path) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that GPUs are nearest to, without those that cannot be read."""
    numbers = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    return tuple(node for number in numbers if (node := _numa_node(number, sysfs)) is not None)


def _numa_node(number: int, sysfs: Path) -> NumaNode | None:
    folder = sysfs / "devices/system/node" / f"node{number}"
    try:
        cpus = (folder / "cpulist").read_text(encoding="ascii").strip()
        # A node of memory alone has no CPUs.
        return NumaNode(number, CPULIST.parse(cpus) if cpus else "", memory=_has_memory(folder))
    except (OSError, ValueError, IndexError):
        return None


def _has_memory(folder: Path) -> bool:
    """Return whether a node has memory: `Node 0 MemTotal: 131072 kB` in meminfo; a node of CPUs alone has 0."""
    for line in (folder / "meminfo").read_text(encoding="ascii").splitlines():
        before, found, amount = line.partition(_MEMORY)
        if found and before:
            return int(amount.split()[0]) > 0
    return False


def nvswitches(proc: Path) -> int:
    """Return the number of NVSwitches that the driver counts."""
    return len(_names(proc / "driver/nvidia-nvswitch/devices"))


NODE_FOLDERS: Final = ("", "nvidia-caps", "nvidia-caps-imex-channels", "dri")
CAPABILITIES_DEPTH: Final = 4  # gpuN / mig / giN / ciN
PCI_FOLDERS: Final = ("devices", "drivers/nvidia", "drivers/vfio-pci")  # of functions that came, went, or were bound


def kernel_view(folders: HostFolders) -> Hashable:
    """Return modules, majors, GPUs, PCI functions, MIG instances and device nodes.

    It takes up to 1 ms with MIG on eight GPUs.
    """
    try:
        majors = host_majors(folders.proc)
    except InventoryError:
        majors = None
    # A module that was loaded anew has another inode, so a reload between two looks shows.
    modules = tuple(_inode(folders.sys / "module" / name) for name in MODULES)
    gpus = _names(folders.proc / "driver/nvidia/gpus")
    functions = tuple(_names(folders.sys / "bus/pci" / each) for each in PCI_FOLDERS)
    instances = tuple(_subfolders(folders.proc / "driver/nvidia/capabilities", CAPABILITIES_DEPTH))
    return modules, majors, gpus, functions, instances, tuple(_device_nodes(folders.dev))


def module_load(sys: Path) -> str:
    """Return a value that names this load of the driver's kernel module and the boot, or empty without a module."""
    inode = _inode(sys / "module/nvidia")
    return f"{boot_id()}/{inode}" if inode else ""


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208 (the names are enough)
    except OSError:
        return ()


def _subfolders(folder: Path, depth: int) -> Iterator[str]:
    """Yield the folders below. Inotify cannot watch MIG instances: entries of procfs come and go without a write."""
    try:
        with os.scandir(folder) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in below:
        yield path
        if depth > 1:
            yield from _subfolders(Path(path), depth - 1)


def _device_nodes(dev: Path) -> Iterator[tuple[str, int]]:
    """Yield NVIDIA's nodes and DRM's, with their numbers, so that a node made again under another major shows."""
    for below in NODE_FOLDERS:
        folder = dev / below
        for name in _names(folder):
            if below or name.startswith("nvidia"):
                yield f"{below}/{name}", _device_number(folder / name)


def _device_number(path: Path) -> int:
    try:
        return path.lstat().st_rdev
    except OSError:
        return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


NVIDIA_VENDOR: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"  # VGA and 3D controllers; an NVSwitch is a bridge, a GPU's sound card is multimedia
DRIVER: Final = "nvidia"
VIRTUAL: Final = "physfn"  # a virtual function links to its GPU
INFORMATION_MAX: Final = 16384  # bytes
NOT_GIVEN: Final = "not given to this machine, which is a container itself"
UNLISTED: Final = (
    "bound to nvidia, but NVML does not list it: see `dmesg | grep NVRM`, and check its power supply and whether it "
    "needs the open kernel module"
)


class PciGpu(Struct, frozen=True):
    """A GPU on the bus, and the driver it is bound to, or empty."""

    bus_id: PciBusId
    driver: str

    @property
    def of_machines(self) -> bool:
        """Return whether it is for virtual machines. Vendors' variants have names such as nvgrace_gpu_vfio_pci."""
        return "vfio" in self.driver


def gpus_on_the_bus(sys: Path) -> Iterator[PciGpu]:
    """Yield every NVIDIA GPU by its address, without virtual functions."""
    folder = sys / "bus/pci/devices"
    for name in _names(folder):
        device = folder / name
        if _text(device / "vendor").strip() != NVIDIA_VENDOR or not _text(device / "class").startswith(DISPLAY_CLASS):
            continue
        try:
            bus_id = parse_bus_id(name)
        except ValueError:
            continue
        if not (device / VIRTUAL).is_symlink():
            yield PciGpu(bus_id, _driver(device))


def unlisted_gpus(
    folders: HostFolders, listed: Container[str], *, faults: int = 0, fault: str = ""
) -> tuple[KernelGpu, ...]:
    """Return the GPUs on the bus that are not among `listed`, the bus ids that NVML reported.

    faults: the number of GPUs that NVML counted and could not name. fault: why NVML lists no GPU at all.
    """
    away = not_given(folders)
    seen = (_kernel_gpu(gpu, folders.proc, fault) for gpu in gpus_on_the_bus(folders.sys) if gpu.bus_id not in listed)
    found = [
        replace(gpu, reason=NOT_GIVEN, given=False) if gpu.reason == UNLISTED and gpu.minor_number in away else gpu
        for gpu in seen
    ]
    ours = [gpu for gpu in found if gpu.reason == UNLISTED]
    # If these are as many as NVML could not name, they are the same GPUs, and NVML has reported their faults.
    reported = ours if len(ours) == faults else []
    return tuple(gpu for gpu in found if gpu not in reported)


def not_given(folders: HostFolders) -> frozenset[int]:
    """Return the minors of the host's GPUs that this machine was not given, or none if it is no container.

    In a node of kind or LXD the driver's files list all GPUs of the host, and /dev has the nodes of some.
    """
    told = (folders.proc / "driver/nvidia/gpus").glob("*/information")
    minors = {minor for path in told if (minor := _gpu_minor(driver_fields(_text(path)))) is not None}
    # Device cgroups answer access(2), too; opening a node would wake its GPU.
    usable = {minor for minor in minors if os.access(folders.dev / f"nvidia{minor}", os.R_OK | os.W_OK)}
    return frozenset(minors - usable) if usable and _is_container(folders) else frozenset()


def _is_container(folders: HostFolders) -> bool:
    """Return whether the machine itself is a container (systemd: CONTAINER_INTERFACE)."""
    if (folders.host / "run/systemd/container").exists():
        return True
    return any(each.startswith("container=") for each in _text(folders.proc / "1/environ").split("\0"))


def _kernel_gpu(gpu: PciGpu, proc: Path, fault: str) -> KernelGpu:
    if gpu.driver != DRIVER:
        return KernelGpu(pci_bus_id=gpu.bus_id, reason=_other_driver(gpu), set_aside=gpu.of_machines)
    facts = driver_fields(_text(proc / "driver/nvidia/gpus" / gpu.bus_id / "information"))
    excluded = facts.get("GPU Excluded", "") == "Yes"
    return KernelGpu(
        pci_bus_id=gpu.bus_id,
        uuid=UUID.or_empty(facts.get("GPU UUID", "")),  # `GPU-????????-...` of a GPU that was never started
        model=MODEL.or_empty(facts.get("Model", "")),
        minor_number=_gpu_minor(facts),
        reason="excluded by the driver (NVreg_ExcludedGpus of module nvidia)" if excluded else fault or UNLISTED,
        set_aside=excluded,
    )


def _other_driver(gpu: PciGpu) -> str:
    if not gpu.driver:
        return "not bound to a driver: run `modprobe nvidia`, and see `dmesg | grep NVRM` if that does not bind it"
    means = "for a virtual machine" if gpu.of_machines else "so NVIDIA's driver cannot use it"
    return f"bound to {gpu.driver}, {means}"


def _gpu_minor(facts: Mapping[str, str]) -> int | None:
    return decimal(facts.get("Device Minor", ""), GPU_INDEX_MAX)


def _driver(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def _text(path: Path) -> str:
    return text_of(path, INFORMATION_MAX) or ""


GPU_INSTANCES_MAX: Final = 15
COMPUTE_INSTANCES_MAX: Final = 8
# The numbering by drivers from 515 to 595 (kernel-open/nvidia/nv-caps.c): only to compare with.
_FIRST: Final = 3
_PER_GPU: Final = 135
_PER_INSTANCE: Final = 9


def usual_minors(gpu_minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[int, int] | None:
    """Return the minors of GPU and compute instance, as drivers number them, or None if there is no such capability."""
    limits = (DRIVER_GPUS_MAX, GPU_INSTANCES_MAX, COMPUTE_INSTANCES_MAX)
    if any(map(ge, (gpu_minor, gpu_instance_id, compute_instance_id), limits)):
        return None
    instance = _FIRST + _PER_GPU * gpu_minor + _PER_INSTANCE * gpu_instance_id
    return instance, instance + 1 + compute_instance_id


def with_minors(gpus: Sequence[Gpu], proc: Path) -> tuple[Gpu, ...]:
    """Return the GPUs with the capability minors of their MIG devices, or with why these are unknown."""
    if not any(gpu.mig for gpu in gpus):
        return tuple(gpus)
    table = read_mig_minors(text_of(proc / "driver/nvidia-caps/mig-minors") or "")
    return tuple(
        replace(gpu, mig=tuple(_with_minors(gpu, device, proc, table) for device in gpu.mig)) if gpu.mig else gpu
        for gpu in gpus
    )


def unusual_minors(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return a sentence for each MIG device with minors that known drivers do not use; they are used all the same."""
    return tuple(
        f"MIG device {part.uuid} has capability minors {minors[0]}, {minors[1]}; known drivers use {usual}"
        for gpu in gpus
        for part in gpu.mig
        if None not in (minors := (part.gpu_instance_minor, part.compute_instance_minor))
        and minors != (usual := usual_minors(gpu.minor_number, part.gpu_instance_id, part.compute_instance_id))
    )


def _with_minors(gpu: Gpu, device: MigDevice, proc: Path, table: Mapping[str, int]) -> MigDevice:
    instance = f"gi{device.gpu_instance_id}"
    try:
        gpu_instance, compute_instance = (
            _capability_minor(gpu, name, proc, table)
            for name in (f"{instance}/access", f"{instance}/ci{device.compute_instance_id}/access")
        )
    except _UnknownMinorError as error:
        return replace(device, unavailable=device.unavailable or str(error))
    return replace(device, gpu_instance_minor=gpu_instance, compute_instance_minor=compute_instance)


class _UnknownMinorError(Exception):
    """The reason why a capability's minor is unknown."""


def _capability_minor(gpu: Gpu, name: str, proc: Path, table: Mapping[str, int]) -> int:
    """Return the minor of a capability. Raises: _UnknownMinorError."""
    path = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor_number}" / "mig" / name
    text, listed = text_of(path), table.get(f"gpu{gpu.minor_number}/{name}")
    if text is None:
        if listed is None:
            raise _UnknownMinorError(f"the driver shows no capability for it ({path} does not exist)")
        return listed
    minor = decimal(driver_fields(text).get("DeviceFileMinor", ""), CAP_MINOR_MAX)
    if minor is None:
        raise _UnknownMinorError(f"{path} has no DeviceFileMinor")
    if listed not in (None, minor):
        raise _UnknownMinorError(f"{path} has minor {minor}, but mig-minors has {listed}")
    return minor
