"""The driver's kernel modules: their versions, the majors of their devices, and the minors of MIG capabilities."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.bounds import DRM_NAME
from nri_gpu.domain.node import Majors
from nri_gpu.system.storage import text_of

MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")  # as sysfs names them
SYSFS: Final = Path("/sys")
PROC: Final = Path("/proc/driver/nvidia/version")

TEXT_MAX: Final = 4096  # bytes
CAP_MINOR_MAX: Final = 8191  # as many minors as the driver registers (kernel-open/nvidia/nv-caps.c)
_CHARACTER_DEVICES: Final = "Character devices:"
_VERSION: Final = re.compile(r"\d{1,5}(?:\.\d{1,5}){1,2}")
# `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build`, on the first line.
_IN_PROC: Final = re.compile(rf"Kernel Module\b.*?\s({_VERSION.pattern})(?:\s|$)")


def module_version(sysfs: Path = SYSFS, proc: Path = PROC) -> str:
    """Return the version of module nvidia, `580.95.05`, or empty if it is not loaded. It takes up to 50 us.

    A module built without its version in sysfs has it in proc.
    Source: NVIDIA/open-gpu-kernel-modules kernel-open/nvidia/nv-procfs.c.
    """
    version = _version(sysfs, "nvidia")
    if _VERSION.fullmatch(version):
        return version
    match = _IN_PROC.search((text_of(proc, TEXT_MAX) or "").partition("\n")[0])
    return match[1] if match else ""


def module_versions(sysfs: Path = SYSFS) -> dict[str, str]:
    """Return the version of each module that is loaded, or empty for a module without a version."""
    return {name: _version(sysfs, name) for name in MODULES if (sysfs / "module" / name).is_dir()}


def _version(sysfs: Path, name: str) -> str:
    return (text_of(sysfs / "module" / name / "version", TEXT_MAX) or "").strip()


def drm_nodes(device: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, major and minor of a GPU's card and render node. device: its folder on the PCI bus, in sysfs."""
    try:
        found = sorted((device / "drm").iterdir())
    except OSError:
        return  # nvidia-drm is not loaded
    for node in found:
        if not DRM_NAME.matches(node.name):
            continue
        try:
            major, _, minor = (node / "dev").read_text(encoding="ascii").strip().partition(":")
            yield node.name, int(major), int(minor)
        except (OSError, ValueError):
            continue  # the node is gone by now


def read_majors(proc_devices_text: str) -> Majors:
    """Return the majors of the loaded modules.

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
    """Return every major of each name: some modules take a second major when their first has no minors left."""
    names: dict[str, frozenset[int]] = {}
    for name, major in _character_devices(proc_devices_text):
        names[name] = names.get(name, frozenset()) | {major}
    return names


def _character_devices(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and major. Block devices have their own section, with numbers and names that may be the same."""
    section = ""
    for line in text.splitlines():
        if line.endswith(":"):
            section = line
            continue
        major, _, name = line.strip().partition(" ")
        if section == _CHARACTER_DEVICES and major.isascii() and major.isdigit():
            yield name, int(major)


def read_mig_minors(mig_minors_text: str) -> Mapping[str, int]:
    """Return the minor of each capability, from lines like `gpu0/gi0/access 3`; other lines are skipped."""
    pairs = (line.split() for line in mig_minors_text.splitlines())
    found = ((pair[0], decimal(pair[1], CAP_MINOR_MAX)) for pair in pairs if len(pair) == 2)
    return {name: minor for name, minor in found if minor is not None}


def driver_fields(text: str) -> Mapping[str, str]:
    """Return the fields of a file of the driver's, from lines like `Device Minor: 0`; the first of each name."""
    parts = (line.partition(":") for line in reversed(text.splitlines()))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def decimal(text: str, most: int) -> int | None:
    """Return the number that a text is, or None if it is no number or more than `most`."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= most else None
