"""The memory that a policy was in force, which outlives a reboot: without it, a file that vanished would be no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import stat_of, text_of, write_whole

UNIT_FOLDER: Final = Path("/var/lib/nri-gpu")  # the state directory of systemd/nri-gpu.service
IN_FORCE: Final = "policy.in-force"  # in that folder
RUNTIME: Final = "the runtime's NRI configuration for this plugin"
UNKNOWN: Final = "a file that is no longer known"


def unit_folder() -> Path | None:
    """Return the first folder that systemd made for `StateDirectory=`, or None outside a unit."""
    first = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(first) if first else None


class PolicyMemory:
    """The memory in this folder. Without a folder, as for a daemon that is started by hand, nothing is remembered."""

    def __init__(self, folder: Path | None) -> None:
        self.file = folder / IN_FORCE if folder else None

    @property
    def source(self) -> str:
        """Return the origin of the last policy in force, or empty. A memory that cannot be read counts as a policy."""
        if self.file is None:
            return ""
        try:
            if stat_of(self.file) is None:
                return ""
        except OSError:
            return UNKNOWN
        return (text_of(self.file, encoding="utf-8") or "").strip() or UNKNOWN

    def remember(self, source: str) -> None:
        """Remember that a policy from `source` is in force. Raises: OSError."""
        if self.file and self.source != source:
            write_whole(self.file, f"{source}\n".encode(), sync=True)


FORGETFUL: Final = PolicyMemory(None)
