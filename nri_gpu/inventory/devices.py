"""The majors of the driver's character devices, from /proc/devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Majors

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
