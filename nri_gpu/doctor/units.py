"""The units of systemd: installed ones, enabled ones, and the unit of a process. systemd is not asked."""

from __future__ import annotations

import os
import re
from typing import Final

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.processes import RunningProgram
from nri_gpu.system.storage import text_of

UNIT_FOLDERS: Final = ("/etc/systemd/system", "/usr/lib/systemd/system", "/usr/local/lib/systemd/system")
_UNIT: Final = re.compile(r"/system\.slice/(?:[^\n]*/)?([^/\n]+)\.service")


def is_installed(seen: Examined, unit: str) -> bool:
    return any(seen.at(f"{folder}/{unit}").exists() for folder in UNIT_FOLDERS)


def is_enabled(seen: Examined, unit: str) -> bool:
    """Return whether systemd starts the unit at boot; its link may lead out of the root folder."""
    return any(os.path.lexists(each / unit) for each in seen.at(UNIT_FOLDERS[0]).glob("*.wants"))


def unit_of(seen: Examined, process: RunningProgram | None, units: tuple[str, ...]) -> str:
    """Return the unit of a process, by its cgroup; else the first of `units` that is installed; else the first."""
    running = _UNIT.search(text_of(seen.at(f"/proc/{process.pid}/cgroup"), 4096) or "") if process else None
    return running[1] if running else next((each for each in units if is_installed(seen, f"{each}.service")), units[0])
