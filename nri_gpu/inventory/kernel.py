"""GPUs as the kernel shows them, for those that NVML does not list: nothing of them can be granted, and why.

The bus is the kernel's own to tell. What the driver tells of a GPU is read only of those that are bound to it: such a
file may wait for a driver that hangs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import KernelGpu, PciBusId
from nri_gpu.files import text_of
from nri_gpu.inventory.glance import Places
from nri_gpu.inventory.identity import parse_bus_id, parse_model, parse_uuid

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


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return []


def _told(path: Path) -> str:
    return text_of(path, INFORMATION_MAX) or ""
