"""A Debian system that systemd has booted: as `DebianRoot`, and its first process is its own systemd.

    with BootedRoot("bookworm") as root:
        root.run("systemctl", "is-active", "nri-gpu")

It has its own mounts, processes, network, host name and IPC, and as its cgroups one group of cgroup v2 and what is
below. The kernel's settings are read-only in it, and it has no right to load modules or set the clock.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.support import cleanup
from tests.support.debian_root import MOUNTS, DebianRoot
from tests.support.waiting import wait_for

BOOT_S: Final = 60.0
# It is the machine's part to look after devices, kernel and clock, and nobody logs in.
MASKED: Final = (
    "systemd-udevd.service",
    "systemd-logind.service",
    "systemd-sysctl.service",
    "systemd-modules-load.service",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-journald-audit.socket",
    "sys-fs-fuse-connections.mount",
    "dev-hugepages.mount",
    "getty.target",
    "timers.target",
)
CAPABILITIES: Final = "-sys_time,-sys_module,-sys_rawio,-syslog,-audit_control"
# $1: the folder that is mounted. systemd takes a file system for its own to mount, unless it is there.
BOOT: Final = f"""
root=$1/root
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for node in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    mknod -m 0666 "$root/dev/${{node%% *}}" c ${{node#* }}
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s pts/ptmx "$root/dev/ptmx"
for unit in {" ".join(MASKED)}; do ln -sf /dev/null "$root/etc/systemd/system/$unit"; done
cd "$root"
pivot_root . mnt
umount -l /mnt
echo ready
exec setpriv --bounding-set={CAPABILITIES} env -i container=test /lib/systemd/systemd
"""
# A group of its own first, of which it sees no more than what is below.
JOIN_AND_BOOT: Final = f"""
mkdir "$work/cgroup"
mount -t cgroup2 none "$work/cgroup"
mkdir "$work/cgroup/${{work##*/}}"
echo $$ >"$work/cgroup/${{work##*/}}/cgroup.procs"
umount "$work/cgroup"
exec unshare --cgroup sh -ec {shlex.quote(BOOT)} boot "$work"
"""


def starting(command: str) -> str:
    """A drop-in by which a service starts that instead."""
    return f"[Service]\nExecStart=\nExecStart={command}\n"


class BootedRoot(DebianRoot):
    """One system, from `open` (or `with`) on. Arguments as of DebianRoot: what one keeps in a folder, another boots."""

    def __init__(
        self,
        suite: str,
        seen: Mapping[Path, str] | None = None,
        *,
        included: Sequence[str] = (),
        changed: Path | None = None,
        over: Path | None = None,
    ) -> None:
        super().__init__(suite, seen, included=("python3", "systemd", *included), changed=changed, over=over)
        self._script = MOUNTS + JOIN_AND_BOOT
        self._namespaces = [*self._namespaces, "--uts", "--ipc", "--net"]

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            wait_for("systemd to have booted", self._booted, BOOT_S, self._explain)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        super().__exit__()
        cleanup.remove_cgroups(Path(self._work).name)

    def command(self, *words: str) -> list[str]:
        """What runs words in it, in its view of cgroups."""
        nsenter, *rest = super().command(*words)
        return [nsenter, "--cgroup", *rest]

    def _booted(self) -> bool:
        return self.try_run("systemctl", "is-system-running").stdout == "running\n"

    def _explain(self) -> str:
        return self.try_run("systemctl", "--no-pager", "list-units", "--failed").stdout
