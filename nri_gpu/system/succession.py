"""Two daemons on one state folder, one after the other: the successor stands by before its predecessor ends.

The successor locks the file `successor` in the folder, and waits for the folder's own lock. The predecessor, told to
stop, finds `successor` locked: it ends its NRI connection, releases the folder, and serves the kubelet until the
successor does so and unlocks the file. Locks instead of messages, because the kernel releases the locks of a process
that dies.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import open_lock, stat_of, try_lock

LOOK_S: Final = 0.02
TAKES_OVER_S: Final = 10.0  # Register and what the kubelet dials for it; a unit's or a pod's time to stop is longer


class Succession:
    """A daemon's side of a succession, as successor or as predecessor."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "successor"
        self._lock: int | None = None

    @property
    def succeeds(self) -> bool:
        """Return whether this daemon is a successor that has not taken over everything yet."""
        return self._lock is not None

    def announce(self) -> bool:
        """Become the successor, or return False if another daemon is. Raises: OSError."""
        lock = open_lock(self._file)
        if not try_lock(lock):
            os.close(lock)
            return False
        self._lock = lock
        return True

    def settled(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def awaited(self) -> bool:
        """Return whether this daemon has a successor that has not taken over yet."""
        try:
            if stat_of(self._file) is None:  # a probe makes no file
                return False
            lock = open_lock(self._file)
        except OSError:
            return False
        free = try_lock(lock)
        os.close(lock)
        return not free

    async def passed(self) -> None:
        """Return once the successor has taken over, or after TAKES_OVER_S."""
        until = asyncio.get_running_loop().time() + TAKES_OVER_S
        while self.awaited() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - a lock has no event
            await asyncio.sleep(LOOK_S)
