"""The node that `doctor` looks at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.doctor.clock import clock_state
from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.policy.model import Policy
from nri_gpu.system.storage import stat_of


class Examined(Struct, frozen=True, kw_only=True):
    """The node. root: the folder that is its `/`; all paths of policy and state are below it.

    policy: in force, or the defaults where it has faults (policy_error). status: of the running daemon; None where it
    could not be asked, and silence says why (an OSError, or a ValueError for an answer that is none). in_pod: it is
    what a pod shows. now_s: since the epoch. clock, statvfs: the kernel's answers.
    """

    root: Path = Path("/")
    policy: Policy = Policy.default()
    policy_error: PolicyError | None = None
    status: DaemonStatus | None = None
    silence: OSError | ValueError | None = None
    state_dir: Path = DEFAULT_STATE
    guard_dir: Path = DEFAULT_RUN_DIR
    in_pod: bool = False
    now_s: float = 0.0
    clock: Callable[[], int] = clock_state
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def at(self, path: str | Path) -> Path:
        """Where a path of the node is for us."""
        return below(self.root, path)

    @property
    def simulated(self) -> bool:
        return self.status is not None and self.status.node.simulated


def below(root: Path, path: str | Path) -> Path:
    """A path below a root folder. /var/run is mostly a link to /run, which would lead out of the root."""
    inside = str(path).lstrip("/")
    if inside.startswith("var/run/") and root != Path("/"):
        inside = inside.removeprefix("var/")
    return root / inside


def is_there(path: Path) -> bool:
    """Also where this user may not look: reading it says why not."""
    try:
        return stat_of(path) is not None
    except OSError:
        return True
