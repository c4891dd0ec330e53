"""The driver's kernel modules: which are loaded, and in which version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import text_of

MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")  # as sysfs names them
SYSFS: Final = Path("/sys")
PROC: Final = Path("/proc/driver/nvidia/version")

TEXT_MAX: Final = 4096  # bytes
_VERSION: Final = re.compile(r"\d{1,5}(?:\.\d{1,5}){1,2}")
# `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build`, on the first line.
_IN_PROC: Final = re.compile(rf"Kernel Module\b.*?\s({_VERSION.pattern})(?:\s|$)")


def module_version(sysfs: Path = SYSFS, proc: Path = PROC) -> str:
    """The version of module nvidia, `580.95.05`; empty where it is not loaded. Takes up to 50 us.

    A module built without its version in sysfs has it in proc.
    Source: NVIDIA/open-gpu-kernel-modules kernel-open/nvidia/nv-procfs.c.
    """
    version = _version(sysfs, "nvidia")
    if _VERSION.fullmatch(version):
        return version
    match = _IN_PROC.search((text_of(proc, TEXT_MAX) or "").partition("\n")[0])
    return match[1] if match else ""


def module_versions(sysfs: Path = SYSFS) -> dict[str, str]:
    """The version of each module that is loaded; empty for one that has none."""
    return {name: _version(sysfs, name) for name in MODULES if (sysfs / "module" / name).is_dir()}


def _version(sysfs: Path, name: str) -> str:
    return (text_of(sysfs / "module" / name / "version", TEXT_MAX) or "").strip()
