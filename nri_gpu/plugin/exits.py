"""Exits of containers that the runtime does not tell us of.

containerd holds its lock while it synchronizes a plugin, and only then adds it to those that it calls. The exit of a
container waits for that lock, and may be told to the plugins without us; no other event of that container comes until
it is removed (containerd: internal/nri/nri.go, NotifyContainerExit and syncPlugin). Nor is a start that fails told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from loguru import logger

from nri_gpu.domain.container import ContainerId

TOLD_WITHIN_S: Final = 1.0  # how long to wait for the runtime's own exit event, which takes precedence
WATCHED_MAX: Final = 512  # descriptors, of the 1,024 that a process has by default


class UntoldExits:
    """A watch of containers' processes, each until the runtime tells of its container's end.

    exited: called with a container whose process ended, and of which the runtime said nothing for told_within_s.
    """

    def __init__(self, exited: Callable[[ContainerId], None], told_within_s: float = TOLD_WITHIN_S) -> None:
        self._exited = exited
        self._told_within_s = told_within_s
        self._forget: dict[ContainerId, Callable[[], object]] = {}
        self._over: set[ContainerId] = set()  # whose process has ended, told or not
        self._without_pid: set[ContainerId] = set()  # in the last list, and not seen before
        self.unsure: set[ContainerId] = set()  # running by the last list, and may be over: another list tells

    def watch(self, container_id: ContainerId, pid: int) -> None:
        """Watch a container that the runtime says is there. pid: of its process, in our PID namespace.

        The pid is 0 where it is not known: containerd lists a container that has just ended as running, without a PID.
        Such a container is over if we saw its process end, and is watched on if not.
        """
        if not pid:
            if container_id in self._over:
                self._ended(container_id)
            return
        self.told(container_id)
        if len(self._forget) >= WATCHED_MAX:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(container_id)
        except (OSError, OverflowError) as error:
            bound = logger.bind(container_id=container_id, fault=str(error))
            bound.warning("process of a container cannot be watched")
        else:
            loop = asyncio.get_running_loop()
            loop.add_reader(fd, self._ended, container_id)
            self._forget[container_id] = partial(_close, loop, fd)

    def listed(self, pids: Mapping[ContainerId, int]) -> None:
        """Take which containers the runtime lists as running. pids: of their processes; 0 where the list has no PID.

        A container without a PID, whose process we never saw, has just ended, or its shim does not answer (containerd
        takes the PID from Task()). So it is unsure, but not again where the next list has no PID of it either.
        """
        known = self._forget.keys() | self._over
        without_pid = {container_id for container_id, pid in pids.items() if not pid} - known
        for container_id in known - pids.keys():
            self.told(container_id)
        self.unsure = without_pid - self._without_pid
        self._without_pid = without_pid

    def told(self, container_id: ContainerId) -> None:
        """Stop watching a container: the runtime told of its end, or of its beginning."""
        self._over.discard(container_id)
        self.unsure.discard(container_id)
        if forget := self._forget.pop(container_id, None):
            forget()

    def _ended(self, container_id: ContainerId) -> None:
        self.told(container_id)
        self._over.add(container_id)
        timer = asyncio.get_running_loop().call_later(self._told_within_s, self._untold, container_id)
        self._forget[container_id] = timer.cancel

    def _untold(self, container_id: ContainerId) -> None:
        del self._forget[container_id]
        self._exited(container_id)


def _close(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    loop.remove_reader(fd)
    os.close(fd)
