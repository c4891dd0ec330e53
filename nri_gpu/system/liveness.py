"""The liveness file: an event loop writes that it runs, and a probe reads it without asking the process.

    alive: seconds of CLOCK_BOOTTIME, as in /proc/uptime, and `ready` or `waits`; always as many bytes

Only the loop that answers requests writes the file, so that its age says how long the loop has answered nobody.
The bytes are written over the previous ones, by a descriptor that stays open: neither a full disk nor a process without
descriptors makes the file old. The probe is in the chart (`nri-gpu.alive` in _helpers.tpl).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.storage import text_of
from nri_gpu.system.tasks import LogOnce

ALIVE: Final = "alive"
WRITE_EVERY_S: Final = 2.0
UNWRITTEN: Final = "liveness file not written"


class LivenessFile:
    """The file of one process, in a folder of its own; an earlier one is removed. folder: None for no file."""

    def __init__(self, folder: Path | None, mode: int = 0o644) -> None:
        self._mode = mode
        self._path = folder / ALIVE if folder else None
        self._descriptor: int | None = None
        self._faults = LogOnce()
        if self._path:
            with self._faults.guard(UNWRITTEN, path=str(self._path)):
                self._path.unlink(missing_ok=True)

    def keep(self, ready: Callable[[], bool]) -> None:
        """Write the file from the running event loop from now on. ready: whether the process does its work."""
        if self._path:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self.keep, ready)
            self.write(ready())

    def write(self, ready: bool) -> None:
        if self._path is None:
            return
        with self._faults.guard(UNWRITTEN, path=str(self._path)):
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, self._mode)
            os.pwrite(self._descriptor, b"%10d %s\n" % (since_boot_s(), b"ready" if ready else b"waits"), 0)


def alive_age_s(folder: Path) -> float | None:
    """Return the seconds since a process wrote its liveness file, or None if there is none."""
    written, *_ = (text_of(folder / ALIVE, 64) or "").split() or [""]
    return since_boot_s() - int(written) if written.isdecimal() else None
