"""The host's NUMA nodes, as the kernel lists their CPUs. Read with the inventory, never for a container."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, PciBusId
from nri_gpu.domain.node import KernelGpu, Majors, NumaNode
from nri_gpu.inventory.identity import parse_bus_id, parse_model, parse_uuid
from nri_gpu.system.storage import text_of

CPULIST_MAX: Final = 4096  # characters, a page of sysfs
_CPULIST: Final = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*", re.ASCII)
_MEMORY: Final = "MemTotal:"


def parse_cpulist(text: str) -> str:
    """The kernel's list syntax, `0-15,32-47`, as it is.

    Raises: ValueError.
    """
    if len(text) > CPULIST_MAX or not _CPULIST.fullmatch(text):
        raise ValueError(f'{text[:64]!r} is not a list of CPUs ("0-15,32-47")')
    return text


def numa_nodes(gpus: Iterable[Gpu], sysfs: Path) -> tuple[NumaNode, ...]:
    """The nodes that GPUs are nearest to; one that cannot be read is left out."""
    numbers = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    return tuple(node for number in numbers if (node := _read(number, sysfs)) is not None)


def _read(number: int, sysfs: Path) -> NumaNode | None:
    folder = sysfs / "devices/system/node" / f"node{number}"
    try:
        listed = (folder / "cpulist").read_text(encoding="ascii").strip()
        cpus = parse_cpulist(listed) if listed else ""  # a node of memory alone
        return NumaNode(number, cpus, memory=_has_memory(folder))
    except (OSError, ValueError):
        return None


def _has_memory(folder: Path) -> bool:
    """Source: `Node 0 MemTotal:  131072 kB` in meminfo; a node of CPUs alone has 0."""
    for line in (folder / "meminfo").read_text(encoding="ascii").splitlines():
        before, found, amount = line.partition(_MEMORY)
        if found and before:
            return int(amount.split()[0]) > 0
    return False


PROC_DEVICES: Final = "/proc/devices"
_SECTION: Final = "Character devices:"


def read_majors(proc_devices_text: str) -> Majors:
    """Majors of the modules that are loaded.

    Up to driver 535 the one line is `nvidia-frontend`; from 545 there is `nvidia`, beside `nvidiactl` and
    `nvidia-modeset` under the same number. Source: NVIDIA/nvidia-container-toolkit internal/info/proc/devices.
    """
    majors = _character_devices(proc_devices_text)
    return Majors(
        nvidia=majors.get("nvidia", majors.get("nvidia-frontend")),
        nvidia_uvm=majors.get("nvidia-uvm"),
        nvidia_caps=majors.get("nvidia-caps"),
        modeset="nvidia-modeset" in majors if {"nvidia", "nvidiactl"} <= majors.keys() else None,
    )


def majors_by_name(proc_devices_text: str) -> Mapping[str, frozenset[int]]:
    """Every major of each name: some modules take another when their first has no minors left."""
    names: dict[str, frozenset[int]] = {}
    for name, major in _pairs(proc_devices_text):
        names[name] = names.get(name, frozenset()) | {major}
    return names


def host_majors(proc_devices: str = PROC_DEVICES) -> Majors:
    """Majors of this machine.

    Host nodes under /dev are not asked: one left over from before a driver reload carries the old major, and where
    the two disagree the kernel's own table is right.

    Raises: InventoryError.
    """
    try:
        return read_majors(Path(proc_devices).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InventoryError(f"cannot read the majors of the driver's devices: {error}") from error


def _character_devices(text: str) -> Mapping[str, int]:
    """Whole name -> major, of the first section only: block devices reuse numbers and could reuse names."""
    majors: dict[str, int] = {}
    for name, major in _pairs(text):
        majors.setdefault(name, major)
    return majors


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    section = ""
    for line in text.splitlines():
        if line.endswith(":"):
            section = line
            continue
        major, _, name = line.strip().partition(" ")
        if section == _SECTION and major.isascii() and major.isdigit():
            yield name, int(major)


MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
NODE_FOLDERS: Final = ("", "nvidia-caps", "nvidia-caps-imex-channels", "dri")
CAPABILITIES_DEPTH: Final = 4  # gpuN / mig / giN / ciN


class Places(Struct, frozen=True):
    """Where the kernel shows itself; elsewhere in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def glance(places: Places) -> Hashable:
    """What is there: modules, GPUs, MIG instances, device nodes, majors. Up to a millisecond with MIG on eight GPUs."""
    try:
        majors = host_majors(str(places.proc / "devices"))
    except InventoryError:
        majors = None
    # A module that was loaded anew has another inode: a reload between two glances shows.
    modules = tuple(_inode(places.sys / "module" / name) for name in MODULES)
    gpus = tuple(_names(places.proc / "driver/nvidia/gpus"))
    instances = tuple(_tree(places.proc / "driver/nvidia/capabilities", CAPABILITIES_DEPTH))
    return modules, majors, gpus, instances, tuple(_nodes(places.dev))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted, each second
    except OSError:
        return []


def _tree(folder: Path, depth: int) -> Iterator[str]:
    """Instances cannot be watched by inotify: nobody writes to procfs, entries just are there or are not."""
    try:
        with os.scandir(folder) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in below:
        yield path
        if depth > 1:
            yield from _tree(Path(path), depth - 1)


def _nodes(dev: Path) -> Iterator[tuple[str, int]]:
    """NVIDIA's nodes with their numbers: a node that was made again under another major is another one."""
    for below in NODE_FOLDERS:
        folder = dev / below
        for name in _names(folder):
            if below or name.startswith("nvidia"):
                yield f"{below}/{name}", _number(folder / name)


def _number(path: Path) -> int:
    try:
        return path.lstat().st_rdev
    except OSError:
        return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


NVIDIA: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"  # VGA and 3D controllers; an NVSwitch is a bridge, a GPU's sound card is multimedia
DRIVER: Final = "nvidia"
VIRTUAL: Final = "physfn"  # a virtual function names the GPU it is of
MINOR_MAX: Final = 254  # 255 is nvidiactl
INFORMATION_MAX: Final = 16384  # bytes
UNLISTED: Final = "bound to nvidia, but NVML does not list it: see `dmesg | grep NVRM`, and whether it has its power"


class Bound(Struct, frozen=True):
    """A GPU on the bus, and the driver it is bound to; empty for none."""

    bus_id: PciBusId
    driver: str


def gpus_on_the_bus(sys: Path) -> Iterator[Bound]:
    """Every GPU of NVIDIA's by its address, virtual functions left out."""
    folder = sys / "bus/pci/devices"
    for name in sorted(_names(folder)):
        device = folder / name
        if _told(device / "vendor").strip() != NVIDIA or not _told(device / "class").startswith(DISPLAY_CLASS):
            continue
        try:
            bus_id = parse_bus_id(name)
        except ValueError:
            continue
        if not (device / VIRTUAL).is_symlink():
            yield Bound(bus_id, _driver(device))


def unlisted_gpus(
    places: Places, listed: Container[str], *, nameless: int = 0, fault: str = ""
) -> tuple[KernelGpu, ...]:
    """GPUs on the bus that are not among `listed`, bus ids that NVML gave.

    nameless: how many NVML counted and could not name. fault: why NVML tells of none at all.
    """
    found = [_gpu(each, places.proc, fault) for each in gpus_on_the_bus(places.sys) if each.bus_id not in listed]
    ours = [gpu for gpu in found if gpu.reason == UNLISTED]
    # As many as NVML could not name: they are these, and NVML has said what is wrong with them.
    known = ours if len(ours) == nameless else []
    return tuple(gpu for gpu in found if gpu not in known)


def _gpu(bound: Bound, proc: Path, fault: str) -> KernelGpu:
    if bound.driver != DRIVER:
        return KernelGpu(pci_bus_id=bound.bus_id, reason=_elsewhere(bound.driver))
    told = _information(proc / "driver/nvidia/gpus" / bound.bus_id / "information")
    minor = told.get("Device Minor", "")
    excluded = told.get("GPU Excluded", "") == "Yes"
    return KernelGpu(
        pci_bus_id=bound.bus_id,
        uuid=_parsed(parse_uuid, told.get("GPU UUID", "")),
        model=_parsed(parse_model, told.get("Model", "")),
        minor_number=int(minor)
        if minor.isascii() and minor.isdecimal() and len(minor) < 4 and int(minor) <= MINOR_MAX
        else None,
        reason="excluded by the driver (NVreg_ExcludedGpus of module nvidia)" if excluded else fault or UNLISTED,
    )


def _elsewhere(driver: str) -> str:
    if not driver:
        return "no driver is bound to it: run `modprobe nvidia`, and see `dmesg | grep NVRM` if that leaves it so"
    if driver.startswith("vfio"):
        return f"bound to {driver}, for a virtual machine"
    return f"bound to {driver}: bind it to nvidia"


def _information(path: Path) -> dict[str, str]:
    r"""`GPU UUID: \t GPU-...` a line. Source: NVIDIA/open-gpu-kernel-modules kernel-open/nvidia/nv-procfs.c."""
    pairs = (line.partition(":") for line in _told(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _parsed(parse: Callable[[str], str], text: str) -> str:
    try:
        return parse(text)
    except ValueError:
        return ""  # `GPU-????????-...` of one that was never started


def _driver(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def _told(path: Path) -> str:
    return text_of(path, INFORMATION_MAX) or ""
