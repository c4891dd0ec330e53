"""`guard.json`, in which the guard reports about itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from nri_gpu.system.process import process_of
from nri_gpu.system.storage import text_of, write_whole

STATUS_FILE: Final = "guard.json"
STATUS_MAX: Final = 1 << 16  # bytes
DEFAULT_RUN_DIR: Final = Path("/run/nri-gpu-guard")
REPORT_EVERY_S: Final = 5.0  # also where the file was removed


class GuardStatus(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/guard/v1"):
    """The report of a guard about itself."""

    pid: int
    started: str  # as of `process_started`
    connected: bool = False
    runtime: str = ""
    runtime_version: str = ""
    validates: bool = False  # whether the runtime lets it validate creations too (NRI 0.10)
    ungranted: int = 0  # containers that ran without the GPUs they asked for when it connected last
    fault: str = ""  # why it is not connected
    cri_fault: str = ""  # why the runtime's CRI cannot be asked
    policy_fault: str = ""  # why the policy as it is written cannot be used; the one from before is in force


def write_guard_status(folder: Path, status: GuardStatus) -> None:
    """Write the status for `check`, which anybody may run. Raises: OSError."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_whole(folder / STATUS_FILE, msgspec.json.encode(status), 0o644)


def read_guard_status(folder: Path = DEFAULT_RUN_DIR) -> GuardStatus | None:
    """Return what the running guard reports; None where no guard runs."""
    try:
        status = msgspec.json.decode(text_of(folder / STATUS_FILE, STATUS_MAX) or "", type=GuardStatus)
    except (ValueError, RecursionError):
        return None
    return status if status.started == process_started(status.pid) else None


def guard_connected(folder: Path) -> bool | None:
    """Return whether a guard runs and is connected; None in a pod, which sees no other pod's guard."""
    if in_pod():
        return None
    status = read_guard_status(folder)
    return status is not None and status.connected


def in_pod() -> bool:
    """Return whether this process is in a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def process_started(pid: int) -> str:
    """Return when a process was started, in the kernel's clock ticks: a pid may be reused. Empty: no such process."""
    process = process_of(pid)
    return str(process.started) if process else ""
