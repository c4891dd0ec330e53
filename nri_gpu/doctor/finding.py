"""What `doctor` finds, and the node that it looks at."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.doctor.clock import clock_state
from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import DEFAULT_PATH
from nri_gpu.system.storage import stat_of

_SETTING: Final = re.compile(r"""\bset ([a-z_]+)\.([a-z_]+) = ("[^"]*"|\[[^\]]*\]|[a-z0-9_]+)""")
_NAMED: Final = re.compile(r"\b[a-z_]+\.[a-z_]+\b")


class Level(StrEnum):
    """How bad it is. UNSEEN: it could not be looked at, and the finding says how it can be."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    UNSEEN = "unseen"


class DoctorFinding(Struct, frozen=True):
    """One finding. subject: what it is about. meaning: a sentence. fix: lines to copy; empty where nothing is wrong."""

    level: Level
    subject: str
    meaning: str
    fix: tuple[str, ...] = ()


def ok(subject: str, meaning: str) -> DoctorFinding:
    return DoctorFinding(Level.OK, subject, meaning)


def warning(subject: str, meaning: str, *fix: str) -> DoctorFinding:
    return DoctorFinding(Level.WARNING, subject, meaning, fix)


def error(subject: str, meaning: str, *fix: str) -> DoctorFinding:
    return DoctorFinding(Level.ERROR, subject, meaning, fix)


def unseen(subject: str, why: str, *fix: str) -> DoctorFinding:
    return DoctorFinding(Level.UNSEEN, subject, why, fix)


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


def policy_lines(sentence: str) -> tuple[str, ...]:
    """What to write into the policy where a sentence advises `set a.b = value`; else which setting to change."""
    named = _NAMED.search(sentence)
    lines = tuple(f"{key} = {value}    # below [{table}]" for table, key, value in _SETTING.findall(sentence))
    where = f"# in {DEFAULT_PATH}:" if lines else f"# change {named[0] if named else 'it'} in {DEFAULT_PATH}, then:"
    return (where, *lines, "nri-gpu check && systemctl reload nri-gpu")
