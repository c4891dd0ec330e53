"""NVIDIA's Multi-Process Service: the share a container asks for and gets, and where both sides find it.

One daemon serves one GPU here, so a container has one GPU and its programs know it as device 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from nri_gpu.domain.value import Recorded

MIB: Final = 2**20
WHOLE_PERCENT: Final = 100
# CUDA's default, so that a program which drops its environment still finds the daemon.
PIPE_PLACE: Final = "/tmp/nvidia-mps"
SHM_PLACE: Final = "/dev/shm"  # server and clients must share one
PIPE_FOLDER, SHM_FOLDER = "pipe", "shm"  # in a daemon's folder
# A separate file system of limited size, mounted by the systemd unit of that name or by the chart (docs/mps.md).
DEFAULT_MPS_DIR: Final = "/run/nri-gpu/mps/clients"

PIPE_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE: Final = "CUDA_MPS_LOG_DIRECTORY"
MEMORY_VARIABLE: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CLIENT_VARIABLES: Final = (PIPE_VARIABLE, MEMORY_VARIABLE, THREADS_VARIABLE)
_MEMORY: Final = re.compile(r"0=([0-9]{1,9})M", re.ASCII)
_THREADS: Final = re.compile(r"[0-9]{1,3}", re.ASCII)


class MpsLimits(Struct, frozen=True):
    """`sharing=memory:10Gi,threads:50`. memory_mib, threads_percent: 0 leaves them to the policy."""

    memory_mib: int = 0
    threads_percent: int = 0


NO_MPS_LIMITS: Final = MpsLimits()


class Seat(Recorded, frozen=True):
    """A container's share of a GPU's MPS daemon."""

    memory_mib: int = 0  # the most that each of its processes may allocate; 0: as much as there is
    threads_percent: int = WHOLE_PERCENT  # of the GPU's multiprocessors
    uid: int | None = None  # the user id of its program on the host, or None while unknown
    # Of one start of the daemon, on the host, with its pipes and shared memory; empty before a GPU is chosen.
    folder: str = ""

    def variables(self) -> Mapping[str, str]:
        """Return the environment of the container's programs."""
        limit = {MEMORY_VARIABLE: f"0={self.memory_mib}M"} if self.memory_mib else {}
        return {PIPE_VARIABLE: PIPE_PLACE, **limit, THREADS_VARIABLE: str(self.threads_percent)}

    @classmethod
    def read(cls, env: Mapping[str, str], uid: int | None, folder: str) -> Seat:
        """Read the share that `variables` was made of back from a container, after a restart."""
        memory = _MEMORY.fullmatch(env.get(MEMORY_VARIABLE, ""))
        threads = _THREADS.fullmatch(env.get(THREADS_VARIABLE, ""))
        return cls(int(memory[1]) if memory else 0, int(threads[0]) if threads else WHOLE_PERCENT, uid, folder)


class MpsFolders(Recorded, frozen=True):
    """The folders where a node's MPS daemons meet their clients: each start of each daemon has its own."""

    base: str = DEFAULT_MPS_DIR  # the file system for all of them
    first: str = "0"  # what a folder's name ends in for GPUs that had no daemon yet
    later: Mapping[str, str] = field(default_factory=dict)  # the same for GPUs that had a daemon, by UUID
    fault: str = ""  # why there can be no daemon, or empty
    # Why the folder of a GPU's next daemon is not there, by UUID.
    unmade: Mapping[str, str] = field(default_factory=dict)

    def generation(self, uuid: str) -> str:
        """Return the start of that GPU's daemon that new containers connect to."""
        return self.later.get(uuid, self.first)

    def folder(self, uuid: str) -> str:
        return f"{self.base}/{uuid}.{self.generation(uuid)}"
