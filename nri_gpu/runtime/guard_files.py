"""What the guard reads of the daemon's state folder, and the one file that it writes about itself.

Nothing is remembered of the key, and of the policy no more than one parsing: both may be replaced at any moment, and
they are looked at only for a container that asked, at some ten microseconds from a filesystem in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from nri_gpu.allocation.mark import KEY_BYTES
from nri_gpu.files import read_private
from nri_gpu.log import logger
from nri_gpu.policy.broken import BrokenPolicy
from nri_gpu.policy.model import Policy

GUARD_SCHEMA: Final = "nri-gpu/guard/v1"
STATE_FILE: Final = "guard.json"
DEFAULT_RUN_DIR: Final = Path("/run/nri-gpu-guard")
TELL_S: Final = 5.0  # a living guard writes its state so often
_START_TIME: Final = 19  # field of /proc/PID/stat, counted behind the name: starttime (Linux: proc_pid_stat(5))


class DaemonState:
    """The daemon's state folder, read only.

    read_policy: called again when one of the policy_files has changed.
    """

    def __init__(
        self, folder: Path, policy_files: tuple[Path, ...], read_policy: Callable[[], Policy | BrokenPolicy]
    ) -> None:
        self._folder = folder
        self._policy_files = policy_files
        self._read_policy = read_policy
        self._known: tuple[tuple[int, ...], Policy | BrokenPolicy] | None = None

    def key(self) -> bytes | None:
        """The marks' key; None where there is none, or none that anybody but root could not have put there."""
        file = self._folder / "key"
        try:
            key = read_private(file, KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.bind(path=str(file), fault=error.strerror).warning("key not read: no mark holds")
            return None
        return key if len(key) == KEY_BYTES else None

    def policy(self) -> Policy | BrokenPolicy:
        """The policy that containers are judged by."""
        signature = tuple(number for file in self._policy_files for number in _signature(file))
        if self._known is None or self._known[0] != signature:
            self._known = (signature, self._read_policy())
        return self._known[1]


class Seen(Struct, frozen=True, kw_only=True):
    """What a guard says of itself. validates: whether the runtime lets it judge creations too (NRI 0.10).

    ungranted: containers that ran without the GPUs they asked for when it connected last.
    fault: why it is not connected.
    """

    pid: int
    started: str
    connected: bool = False
    runtime: str = ""
    runtime_version: str = ""
    validates: bool = False
    ungranted: int = 0
    fault: str = ""


def write_seen(folder: Path, seen: Seen) -> None:
    """For `check`: which anybody may run. Raises: OSError."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = folder / f".{STATE_FILE}.new"
    draft.write_text(json.dumps({"schema": GUARD_SCHEMA, **asdict(seen)}), encoding="utf-8")
    draft.chmod(0o644)
    draft.replace(folder / STATE_FILE)


def read_seen(folder: Path = DEFAULT_RUN_DIR) -> Seen | None:
    """What the guard that runs now says of itself; None where none runs."""
    try:
        raw: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        seen = Seen(**{name: raw[name] for name in Seen.__struct_fields__ if name in raw})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return seen if seen.started == started(seen.pid) else None


def silent_s(folder: Path, now: float) -> float:
    """Seconds since the guard wrote its state. now: since the epoch. Raises: OSError: there is none."""
    return now - (folder / STATE_FILE).stat().st_mtime


def started(pid: int) -> str:
    """When a process was started, in the kernel's own count: a pid may be another's by now. Empty: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TIME]
    except (OSError, IndexError):
        return ""


def _signature(path: Path) -> tuple[int, ...]:
    """What changes with a file's content."""
    try:
        facts = path.stat()
    except OSError:
        return (0,)
    return (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size)
