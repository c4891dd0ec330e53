"""What `doctor` finds, and the node that it looks at."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.policy.model import Policy


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
    could not be asked, and silence says why (an OSError, or a ValueError for an answer that is none).
    """

    root: Path = Path("/")
    policy: Policy = Policy.default()
    policy_error: PolicyError | None = None
    status: DaemonStatus | None = None
    silence: OSError | ValueError | None = None
    state_dir: Path = DEFAULT_STATE
    guard_dir: Path = DEFAULT_RUN_DIR

    def at(self, path: str | Path) -> Path:
        """Where a path of the node is for us."""
        return self.root / str(path).lstrip("/")

    @property
    def simulated(self) -> bool:
        return self.status is not None and self.status.node.simulated


def listed(names: Iterable[str], most: int = 4) -> str:
    """`a, b and 3 more`."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")
