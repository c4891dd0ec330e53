"""A file that never answers, as one of a driver that hangs: its file system is a FUSE server's that says nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class SilentFile:
    """Mounted at `path`: whoever opens it waits. A signal that kills ends the waiting."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._server},rootmode=100444,user_id=0,group_id=0"
        command: list[str | Path] = ["mount", "--internal-only", "--types", "fuse", "--options", options, "none", path]
        subprocess.run(command, pass_fds=[self._server], check=True)

    def fail(self) -> None:
        """From now on whoever opens it, or waits, gets an error."""
        if self._server >= 0:
            os.close(self._server)
            self._server = -1

    def end(self) -> None:
        """The mount is gone."""
        self.fail()
        subprocess.run(["umount", "--lazy", self.path], check=True)
