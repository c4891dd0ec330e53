"""Two daemons of one state folder, one after the other: the next one is there before the last one goes.

The next one locks `successor` there, and waits for the folder's own lock. The last one, told to stop, sees the former:
it ends its NRI connection, lets the folder go, and still serves the kubelet until the next one does and unlocks it.
Locks and no messages, so whoever dies lets go.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import open_lock, try_lock

LOOK_S: Final = 0.02
TAKES_OVER_S: Final = 10.0  # Register and what the kubelet dials for it; a unit's or a pod's time to stop is longer


class Succession:
    """One daemon's part in it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "successor"
        self._lock: int | None = None

    @property
    def succeeds(self) -> bool:
        """Whether this one follows another and has not taken over all of it yet."""
        return self._lock is not None

    def announce(self) -> bool:
        """Follow the one that has the folder; False where another does already. Raises: OSError."""
        lock = open_lock(self._file)
        if not try_lock(lock):
            os.close(lock)
            return False
        self._lock = lock
        return True

    def settled(self) -> None:
        """All is taken over."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def awaited(self) -> bool:
        """Whether another one follows and has not taken over yet."""
        try:
            lock = open_lock(self._file)
        except OSError:
            return False
        free = try_lock(lock)
        os.close(lock)
        return not free

    async def passed(self) -> None:
        """Until the other one has taken over, for a while."""
        until = asyncio.get_running_loop().time() + TAKES_OVER_S
        while self.awaited() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - a lock has no event
            await asyncio.sleep(LOOK_S)
