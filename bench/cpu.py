"""The CPU that one containerd costs with all it starts: shims, runc, containers, and the plugin that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.support.cgroup import Cgroup
from tests.support.containerd import Containerd

ROOT: Final = Path("/sys/fs/cgroup")
DAEMONS: Final = "daemons"  # beside the containers' own groups, in the group that goes when containerd is abandoned


class Meter:
    """Seconds of CPU so far, of one containerd. Made before its first pod: what it starts later is then counted too.

    runc does most of its mounting inside the container's group, so a look at the daemons alone would miss it.
    """

    def __init__(self, node: Containerd) -> None:
        self._v1 = node.cgroup is Cgroup.V1
        self._group = (ROOT / "cpuacct" if self._v1 else ROOT) / node.base.name
        (self._group / DAEMONS).mkdir(parents=True)
        self.add(node.pid)

    def add(self, pid: int) -> None:
        """Count this process, all its threads and its children to come."""
        (self._group / DAEMONS / "cgroup.procs").write_text(str(pid))

    def read_s(self) -> float:
        """Groups below are included, and those that were removed."""
        if self._v1:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        usage = (self._group / "cpu.stat").read_text().split()
        return int(usage[usage.index("usage_usec") + 1]) / 1e6
