"""The CPU's features that loaders of containers depend on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from nri_gpu.domain.node import Loader
from nri_gpu.system.storage import text_of

CPUINFO: Final = Path("/proc/cpuinfo")
TEXT_MAX: Final = 65536  # bytes; the first CPU's lines are enough
# The flags of x86-64-v2 by the kernel's names (System V ABI, AMD64 supplement; glibc: sysdeps/x86/get-isa-level.h).
V2_FLAGS: Final = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")


def why_no_hwcaps(cpuinfo: Path = CPUINFO, machine: str = "") -> str:
    """Return a clause that says why loaders look into no `glibc-hwcaps/x86-64-v2` on this machine, or empty if they do.

    A CPU for which the kernel lists no flags counts as one that has them. machine: as `uname -m`; empty: this one.
    """
    machine = machine or platform.machine()
    if machine != "x86_64":
        return f"it is {machine}, for which glibc has no such levels"
    lines = (text_of(cpuinfo, TEXT_MAX) or "").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), V2_FLAGS)
    missing = [flag for flag in V2_FLAGS if flag not in flags]
    return f"its CPU is no x86-64-v2, since it lacks {', '.join(missing)}" if missing else ""


def loader_fault(loader: Loader, cpuinfo: Path = CPUINFO) -> str:
    """Return a clause that says why `driver.loader` cannot be served as it is meant, or empty if it can."""
    why = why_no_hwcaps(cpuinfo) if loader is Loader.HWCAPS else ""
    return f'driver.loader = "hwcaps" has no effect on this machine: {why}' if why else ""
