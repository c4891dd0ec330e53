"""The versions of the kernel modules that are loaded: from small files of the kernel's, without NVML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nri_gpu.files import text_of

SYSFS: Final = Path("/sys/module/nvidia/version")
MODULES: Final = Path("/sys/module")
NAMES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
PROC: Final = Path("/proc/driver/nvidia/version")

TEXT_MAX: Final = 4096  # bytes
_VERSION: Final = re.compile(r"\d{1,5}(?:\.\d{1,5}){1,2}")
# `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build`, on the first line.
_IN_PROC: Final = re.compile(rf"Kernel Module\b.*?\s({_VERSION.pattern})(?:\s|$)")


def module_version(sysfs: Path = SYSFS, proc: Path = PROC) -> str:
    """`580.95.05`; empty where no nvidia module is loaded. It is up to 50 us of work, and may stand in a sentence.

    A module built without its version in sysfs still tells it in proc.
    Source: NVIDIA/open-gpu-kernel-modules kernel-open/nvidia/nv-procfs.c.
    """
    told = (text_of(sysfs, TEXT_MAX) or "").strip()
    if _VERSION.fullmatch(told):
        return told
    match = _IN_PROC.search((text_of(proc, TEXT_MAX) or "").partition("\n")[0])
    return match[1] if match else ""


def module_versions(sysfs: Path = MODULES) -> tuple[str, ...]:
    """Of each of the driver's modules; empty for one that is not loaded, or was built without its version."""
    return tuple((text_of(sysfs / name / "version", TEXT_MAX) or "").strip() for name in NAMES)
