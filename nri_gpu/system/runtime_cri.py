"""The runtime's CRI, for what NRI does not tell and does not do: one call at a time, each by a child process.

NRI tells nothing of a pod that was removed while the runtime restarted, and nothing of a list that cannot be sent.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_gpu.domain.errors import NriGpuError, cause_of, fault_of
from nri_gpu.policy.plugin_settings import GuardSettings
from nri_gpu.system.child import python, run
from nri_gpu.system.container_stops import stop_containers
from nri_gpu.system.cri_list import CriList

# What a node cannot do where CRI is not reached.
WITHOUT: Final = (
    "a pod that NRI cannot list is not named, a container that runs on GPUs it lost is not killed, and pods that a "
    "restart of containerd forgot count until nri-gpu restarts"
)
REVOKED: Final = "its GPUs went to another pod before it started"
LIMIT_S: Final = 10.0


class CriError(NriGpuError):
    """A failure to reach CRI, or to have its answer in time."""


class RuntimeCri:
    """The runtime's CRI socket. settings: of the policy in force. limit_s: for one call, with the child's start."""

    def __init__(self, settings: Callable[[], GuardSettings], limit_s: float = LIMIT_S) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._lock = asyncio.Lock()
        self._kills: set[asyncio.Task[None]] = set()

    def hindrance(self) -> str:
        """Return why CRI cannot be asked, or empty."""
        path = Path(self._settings().cri_socket)
        try:
            return "" if stat.S_ISSOCK(path.stat().st_mode) else f"{path} is no socket"
        except OSError as error:
            return f"{path}: {cause_of(error)}"

    async def list(self) -> CriList:
        """Ask for all sandboxes and containers. Raises: CriError."""
        if why := self.hindrance():
            raise CriError(why)
        path = self._settings().cri_socket
        async with self._lock:
            try:
                command = (python(), "-I", "-m", "nri_gpu.system.cri_list", path, str(self._limit_s))
                child = await run(command, self._limit_s)
            except (OSError, TimeoutError) as error:
                late = f"no answer on {path} within {self._limit_s:.0f} s"
                raise CriError(fault_of(error) if error.args else late) from error
        try:
            return msgspec.json.decode(child.output, type=CriList)
        except (ValueError, RecursionError):
            raise CriError(child.complaint or f"no answer on {path}") from None

    def kill(self, names: Mapping[str, str], why: str) -> None:
        """Begin to kill containers, which the log names. names: container id -> the pod. why: for the log, too."""
        task = asyncio.get_running_loop().create_task(self._kill(names, why))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def _kill(self, names: Mapping[str, str], why: str) -> None:
        async with self._lock:
            await stop_containers(names, replace(self._settings(), stop_grace_s=0), why, patience_s=self._limit_s / 2)
