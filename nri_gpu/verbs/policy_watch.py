"""Notices that the policy file is another one, where nobody sends a signal: a ConfigMap's, in a pod.

The kubelet swaps a ConfigMap whole, by renaming a link beside the file (`..data`); the file itself never changes. So
its folder is watched, and what the path leads to is looked at. Inotify may be all taken, and an editor that writes in
place wakes nobody, so there is a look every few seconds too: one stat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_S: Final = 10.0
SETTLE_S: Final = 0.2  # a file written in place is whole when it stood still for so long

Signature = tuple[int, int, int, int]


class PolicyWatch:
    """Calls `changed` once for each content of the file that it finds."""

    def __init__(
        self, file: Path, changed: Callable[[], None], *, look_s: float = LOOK_S, settle_s: float = SETTLE_S
    ) -> None:
        self._file = file
        self._changed = changed
        self._look_s = look_s
        self._settle_s = settle_s
        self._known = signature(file)

    async def run(self) -> None:
        """Until cancelled."""
        from nri_gpu.runtime.watch import folder_changed  # here, because it brings ctypes along

        while True:
            await folder_changed(self._file.parent, self._look_s)
            if signature(self._file) != self._known:
                self._known = await self._settled()
                self._changed()

    async def _settled(self) -> Signature | None:
        """What the file is once it stands still."""
        while True:
            before = signature(self._file)
            await asyncio.sleep(self._settle_s)
            if signature(self._file) == before:
                return before


def signature(file: Path) -> Signature | None:
    """What changes with its content, of the file that the path leads to; None where there is none."""
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size
