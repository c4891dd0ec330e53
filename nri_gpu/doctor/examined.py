"""The node that `doctor` looks at."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.policy.model import Policy
from nri_gpu.system.storage import below

TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronized
_TIMEX_BYTES: Final = 512  # struct timex has 208


def clock_state() -> int:
    """Return the state as adjtimex(2) reports it, or a negative number if it fails. Nothing changes: `modes` is 0."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return -1


class Examined(Struct, frozen=True, kw_only=True):
    """The node. Its paths of policy and state are below `root`."""

    root: Path = Path("/")  # the folder that is its `/`
    policy: Policy = Policy.default()  # in force, or the defaults if it has faults (policy_error)
    policy_error: PolicyError | None = None
    status: DaemonStatus | None = None  # of the running daemon, or None if it could not be asked
    silence: OSError | ValueError | None = None  # why not; a ValueError for an answer that is none
    observer: DaemonStatus | None = None  # of an observer, which answers where no daemon does
    state_dir: Path = DEFAULT_STATE
    guard_dir: Path = DEFAULT_RUN_DIR
    in_pod: bool = False  # it is what a pod shows
    now_s: float = 0.0  # since the epoch
    clock: Callable[[], int] = clock_state  # the kernel's answer
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs  # the kernel's answer

    def at(self, path: str | Path) -> Path:
        """Return where a path of the node is for us."""
        return below(self.root, path)

    @property
    def simulated(self) -> bool:
        answer = self.status or self.observer
        return answer is not None and answer.node.simulated
