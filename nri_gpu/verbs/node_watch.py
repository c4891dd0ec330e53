"""Notices that the node changed, and says so at once: device events, new nodes, and a glance each second.

Three sources, because none sees all: the kernel's events tell of PCI functions and modules, but not of MIG instances;
inotify sees nodes that programs make in /dev, of which the kernel knows nothing; the glance finds the rest, and what
the other two miss in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from nri_gpu.inventory.uevents import Uevents, explain
from nri_gpu.log import logger

if TYPE_CHECKING:
    from nri_gpu.runtime.watch import FolderWatch

DEV_FOLDERS: Final = tuple(Path("/dev", below) for below in ("", "nvidia-caps", "dri"))


class Pace(Struct, frozen=True, kw_only=True):
    """Seconds. look_s: between two glances. quiet_s: without news, before a change is told. longest_s: of a burst."""

    look_s: float = 1.0
    quiet_s: float = 0.1
    longest_s: float = 1.0


SIMULATED_PACE: Final = Pace(quiet_s=0.0)


class NodeWatch:
    """Tells `changed` once for each burst of changes. look: a glance; equal ones mean no change.

    waits: whether a look may have to wait for the kernel or a disk: it is made in a thread then. folders: for inotify.
    uevents: whether to listen to the kernel's events; a simulated node has none of either.
    """

    def __init__(
        self,
        look: Callable[[], Hashable],
        changed: Callable[[], None],
        *,
        folders: tuple[Path, ...] = DEV_FOLDERS,
        uevents: bool = True,
        waits: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self._glance = look
        self._waits = waits
        self._changed = changed
        self._folders = folders
        self._uevents = Uevents(self.told) if uevents else None
        self._inotify: FolderWatch | None = None
        self._pace = pace or Pace()
        self._woken = asyncio.Event()
        self._certain = False

    def told(self) -> None:
        """By somebody who knows that something changed, whatever a glance shows."""
        self._certain = True
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._open()
        try:
            seen = await self._look()
            while True:
                if await self._wait(self._pace.look_s):
                    await self._settle()
                certain, self._certain = self._certain, False
                before, seen = seen, await self._look()
                if certain or seen != before:
                    if self._inotify:
                        self._inotify.add(self._folders)  # one of them may be new
                    self._changed()
        finally:
            self._close()

    async def _look(self) -> Hashable:
        return await asyncio.to_thread(self._glance) if self._waits else self._glance()

    def _open(self) -> None:
        """What cannot be had is said once: the glance does the same, up to a second later."""
        try:
            if self._uevents:
                self._uevents.open()
        except OSError as error:
            self._uevents = None
            logger.bind(fault=explain(error)).info("changes of the node are noticed by looking each second")
        if not self._folders:
            return
        from nri_gpu.runtime.watch import FolderWatch  # ctypes: 2 ms and half a MiB, which a simulated node saves

        watch = FolderWatch(self._woken.set)
        try:
            watch.open(self._folders)
            self._inotify = watch
        except OSError as error:
            logger.bind(fault=str(error)).info("device nodes are not watched, but looked at each second")

    def _close(self) -> None:
        for each in (self._uevents, self._inotify):
            if each:
                each.close()

    async def _wait(self, limit_s: float) -> bool:
        """Whether something woke us before the time was up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._woken.wait()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    async def _settle(self) -> None:
        """A driver's installation is a hundred changes: wait for their end, but not for ever."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pace.longest_s
        while loop.time() < until and await self._wait(self._pace.quiet_s):
            pass


def node_watch(look: Callable[[], Hashable], changed: Callable[[], None], *, simulated: bool) -> NodeWatch:
    """Of this machine, or of a topology file, which neither the kernel nor /dev tells anything of."""
    if simulated:
        return NodeWatch(look, changed, folders=(), uevents=False, waits=False, pace=SIMULATED_PACE)
    return NodeWatch(look, changed)
