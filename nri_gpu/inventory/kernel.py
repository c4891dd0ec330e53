"""What the kernel shows of a node without NVML: majors, NUMA nodes, GPUs on the PCI bus, and whether any changed."""

from __future__ import annotations

import os
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, PciBusId
from nri_gpu.domain.node import KernelGpu, Majors, NumaNode
from nri_gpu.inventory.formats import CPULIST, MODEL, UUID, parse_bus_id
from nri_gpu.system.kernel_modules import MODULES
from nri_gpu.system.storage import text_of

PROC_DEVICES: Final = "/proc/devices"
_CHARACTER_DEVICES: Final = "Character devices:"
_MEMORY: Final = "MemTotal:"


class KernelFolders(Struct, frozen=True):
    """Where the kernel's file systems are mounted; tests put them elsewhere."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def host_majors(proc_devices: str = PROC_DEVICES) -> Majors:
    """Majors of this machine's driver modules.

    Nodes under /dev are not consulted: one left from before the driver was reloaded has the old major.

    Raises: InventoryError.
    """
    try:
        return read_majors(Path(proc_devices).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InventoryError(f"cannot read the majors of the driver's devices: {error}") from error


def read_majors(proc_devices_text: str) -> Majors:
    """Majors of the loaded modules.

    Up to driver 535 there is one line, `nvidia-frontend`. From 545 on there is `nvidia`, and `nvidiactl` and
    `nvidia-modeset` with the same number. Source: NVIDIA/nvidia-container-toolkit internal/info/proc/devices.
    """
    majors: dict[str, int] = {}
    for name, major in _character_devices(proc_devices_text):
        majors.setdefault(name, major)
    return Majors(
        nvidia=majors.get("nvidia", majors.get("nvidia-frontend")),
        nvidia_uvm=majors.get("nvidia-uvm"),
        nvidia_caps=majors.get("nvidia-caps"),
        modeset="nvidia-modeset" in majors if {"nvidia", "nvidiactl"} <= majors.keys() else None,
    )


def majors_by_name(proc_devices_text: str) -> Mapping[str, frozenset[int]]:
    """Every major of each name: some modules take another one when their first has no minors left."""
    names: dict[str, frozenset[int]] = {}
    for name, major in _character_devices(proc_devices_text):
        names[name] = names.get(name, frozenset()) | {major}
    return names


def _character_devices(text: str) -> Iterator[tuple[str, int]]:
    """Name and major. Block devices have their own section, with numbers and names that may be the same."""
    section = ""
    for line in text.splitlines():
        if line.endswith(":"):
            section = line
            continue
        major, _, name = line.strip().partition(" ")
        if section == _CHARACTER_DEVICES and major.isascii() and major.isdigit():
            yield name, int(major)


def numa_nodes(gpus: Iterable[Gpu], sysfs: Path) -> tuple[NumaNode, ...]:
    """The NUMA nodes that GPUs are nearest to; one that cannot be read is left out."""
    numbers = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    return tuple(node for number in numbers if (node := _numa_node(number, sysfs)) is not None)


def _numa_node(number: int, sysfs: Path) -> NumaNode | None:
    folder = sysfs / "devices/system/node" / f"node{number}"
    try:
        cpus = (folder / "cpulist").read_text(encoding="ascii").strip()
        # A node of memory alone has no CPUs.
        return NumaNode(number, CPULIST.parse(cpus) if cpus else "", memory=_has_memory(folder))
    except (OSError, ValueError):
        return None


def _has_memory(folder: Path) -> bool:
    """Source: `Node 0 MemTotal:  131072 kB` in meminfo; a node of CPUs alone has 0."""
    for line in (folder / "meminfo").read_text(encoding="ascii").splitlines():
        before, found, amount = line.partition(_MEMORY)
        if found and before:
            return int(amount.split()[0]) > 0
    return False


NODE_FOLDERS: Final = ("", "nvidia-caps", "nvidia-caps-imex-channels", "dri")
CAPABILITIES_DEPTH: Final = 4  # gpuN / mig / giN / ciN


def kernel_view(folders: KernelFolders) -> Hashable:
    """Modules, majors, GPUs, MIG instances and device nodes. Takes up to 1 ms with MIG on eight GPUs."""
    try:
        majors = host_majors(str(folders.proc / "devices"))
    except InventoryError:
        majors = None
    # A module that was loaded anew has another inode, so a reload between two looks shows.
    modules = tuple(_inode(folders.sys / "module" / name) for name in MODULES)
    gpus = tuple(_names(folders.proc / "driver/nvidia/gpus"))
    instances = tuple(_subfolders(folders.proc / "driver/nvidia/capabilities", CAPABILITIES_DEPTH))
    return modules, majors, gpus, instances, tuple(_device_nodes(folders.dev))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 (the names are enough)
    except OSError:
        return []


def _subfolders(folder: Path, depth: int) -> Iterator[str]:
    """Inotify cannot watch MIG instances: entries of procfs appear and disappear without a write."""
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
    """NVIDIA's nodes and DRM's, with their numbers, so that a node made again under another major shows."""
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
MINOR_MAX: Final = 254  # 255 is nvidiactl
INFORMATION_MAX: Final = 16384  # bytes
UNLISTED: Final = "bound to nvidia, but NVML does not list it: see `dmesg | grep NVRM`, and check its power supply"


class PciGpu(Struct, frozen=True):
    """A GPU on the bus, and the driver it is bound to; empty for none."""

    bus_id: PciBusId
    driver: str


def gpus_on_the_bus(sys: Path) -> Iterator[PciGpu]:
    """Every NVIDIA GPU by its address, without virtual functions."""
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
    folders: KernelFolders, listed: Container[str], *, faults: int = 0, fault: str = ""
) -> tuple[KernelGpu, ...]:
    """GPUs on the bus that are not among `listed`, the bus ids that NVML reported.

    faults: the number of GPUs that NVML counted and could not name. fault: why NVML lists no GPU at all.
    """
    found = [_kernel_gpu(gpu, folders.proc, fault) for gpu in gpus_on_the_bus(folders.sys) if gpu.bus_id not in listed]
    ours = [gpu for gpu in found if gpu.reason == UNLISTED]
    # If these are as many as NVML could not name, they are the same GPUs, and NVML has reported their faults.
    reported = ours if len(ours) == faults else []
    return tuple(gpu for gpu in found if gpu not in reported)


def _kernel_gpu(gpu: PciGpu, proc: Path, fault: str) -> KernelGpu:
    if gpu.driver != DRIVER:
        return KernelGpu(pci_bus_id=gpu.bus_id, reason=_other_driver(gpu.driver))
    facts = _information(proc / "driver/nvidia/gpus" / gpu.bus_id / "information")
    excluded = facts.get("GPU Excluded", "") == "Yes"
    return KernelGpu(
        pci_bus_id=gpu.bus_id,
        uuid=UUID.or_empty(facts.get("GPU UUID", "")),  # `GPU-????????-...` of a GPU that was never started
        model=MODEL.or_empty(facts.get("Model", "")),
        minor_number=_minor(facts.get("Device Minor", "")),
        reason="excluded by the driver (NVreg_ExcludedGpus of module nvidia)" if excluded else fault or UNLISTED,
    )


def _other_driver(driver: str) -> str:
    if not driver:
        return "not bound to a driver: run `modprobe nvidia`, and see `dmesg | grep NVRM` if that does not bind it"
    if driver.startswith("vfio"):
        return f"bound to {driver}, for a virtual machine"
    return f"bound to {driver}: bind it to nvidia"


def _information(path: Path) -> dict[str, str]:
    r"""`GPU UUID: \t GPU-...` a line. Source: NVIDIA/open-gpu-kernel-modules kernel-open/nvidia/nv-procfs.c."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _minor(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= MINOR_MAX else None


def _driver(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def _text(path: Path) -> str:
    return text_of(path, INFORMATION_MAX) or ""
