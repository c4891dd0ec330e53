"""The watch for changes of a node's GPUs: a look each second, and inotify on /dev.

The kernel's device events would tell most of it some half a second earlier, and of MIG instances nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import fault_of
from nri_gpu.system.tasks import set_within

if TYPE_CHECKING:
    from nri_gpu.system.folder_watch import FolderWatch

DEV_FOLDERS: Final = tuple(Path("/dev", below) for below in ("", "nvidia-caps", "dri"))


class Pace(Struct, frozen=True, kw_only=True):
    """The watch's intervals."""

    look_s: float = 1.0  # between two looks, in seconds
    quiet_s: float = 0.1  # without news before a change is reported, in seconds
    longest_s: float = 1.0  # the longest burst, in seconds


class NodeWatch:
    """A watch that calls `changed` once for each burst of changes."""

    def __init__(
        self,
        look: Callable[[], Hashable],  # returns the kernel view; equal views mean no change
        changed: Callable[[], None],
        *,
        # For inotify. A look may wait for the kernel, so it is made in a thread; a simulated node has neither.
        folders: tuple[Path, ...] = DEV_FOLDERS,
        pace: Pace | None = None,
    ) -> None:
        self._view = look
        self._changed = changed
        self._folders = folders
        self._inotify: FolderWatch | None = None
        self._pace = pace or Pace()
        self._woken = asyncio.Event()

    async def run(self) -> None:
        self._open()
        try:
            seen = await self._look()
            while True:
                if await self._wait(self._pace.look_s):
                    await self._settle()
                before, seen = seen, await self._look()
                if seen != before:
                    if self._inotify:
                        self._inotify.add(self._folders)  # one of them may be new
                    self._changed()
        finally:
            if self._inotify:
                self._inotify.close()

    async def _look(self) -> Hashable:
        return await asyncio.to_thread(self._view) if self._folders else self._view()

    def _open(self) -> None:
        """Watch the folders, or log that only the look each second finds the same changes, later."""
        if not self._folders:
            return
        from nri_gpu.system.folder_watch import FolderWatch  # a simulated node does without the 2 ms of its import

        watch = FolderWatch(self._woken.set)
        try:
            watch.open(self._folders)
            self._inotify = watch
        except OSError as error:
            logger.bind(fault=fault_of(error)).info("no inotify: polling device nodes for changes each second")

    async def _wait(self, limit_s: float) -> bool:
        """Wait, and return whether something woke us before the time was up."""
        woken = await set_within(self._woken, limit_s)
        self._woken.clear()
        return woken

    async def _settle(self) -> None:
        """Wait for the last of the changes, but not for ever: installing a driver makes a hundred."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pace.longest_s
        while loop.time() < until and await self._wait(self._pace.quiet_s):
            pass
