"""Exits of containers that the runtime does not tell us of.

containerd holds its lock over the whole of Synchronize, and only then adds the plugin to those that it calls. The exit
of a container waits for that lock, and may be told to the plugins without us; no other event of that container comes
until it is removed (containerd: internal/nri/nri.go, NotifyContainerExit and syncPlugin).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Final

from loguru import logger

from nri_gpu.domain.container import ContainerId

TOLD_WITHIN_S: Final = 1.0  # by a runtime that does tell; so what it says and how it is logged stay the rule
WATCHED_MAX: Final = 512  # descriptors, of the 1,024 that a process has by default


class UntoldExits:
    """Watches the processes of containers that the runtime listed, until it tells of them.

    exited: called with a container whose process ended, and the runtime said nothing for told_within_s.
    """

    def __init__(self, exited: Callable[[ContainerId], None], told_within_s: float = TOLD_WITHIN_S) -> None:
        self._exited = exited
        self._told_within_s = told_within_s
        self._forget: dict[ContainerId, Callable[[], object]] = {}

    def watch(self, pids: Mapping[ContainerId, int]) -> None:
        """Watch these containers, and no others. pids: of their processes, in our PID namespace."""
        for id_ in tuple(self._forget):
            self.told(id_)
        faults = [fault for id_, pid in islice(pids.items(), WATCHED_MAX) if (fault := self._watch(id_, pid))]
        if faults:
            bound = logger.bind(containers=len(faults), fault=faults[0])
            bound.warning("processes of containers cannot be watched")

    def told(self, container_id: ContainerId) -> None:
        """The runtime told of this container, so it will tell of its exit too."""
        if forget := self._forget.pop(container_id, None):
            forget()

    def _watch(self, container_id: ContainerId, pid: int) -> str:
        """Why its process cannot be watched; empty if it can."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(container_id)
            return ""
        except (OSError, OverflowError) as error:
            return str(error)
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, self._ended, container_id)
        self._forget[container_id] = partial(_close, loop, fd)
        return ""

    def _ended(self, container_id: ContainerId) -> None:
        self.told(container_id)
        timer = asyncio.get_running_loop().call_later(self._told_within_s, self._untold, container_id)
        self._forget[container_id] = timer.cancel

    def _untold(self, container_id: ContainerId) -> None:
        del self._forget[container_id]
        self._exited(container_id)


def _close(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    loop.remove_reader(fd)
    os.close(fd)
