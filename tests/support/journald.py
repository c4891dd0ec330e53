"""Debian's systemd-journald by itself: in namespaces of its own, without a capability, on folders of the test's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tests.support import packages
from tests.support.waiting import wait_for

PROGRAM: Final = "/lib/systemd/systemd-journald"
MACHINE: Final = "0123456789abcdef0123456789abcdef"
# Whatever it could touch of this machine is covered before it starts: /run, its logs and settings, the kernel's log.
_START: Final = f"""set -e
mount --bind "$1/run" /run
mount --bind "$1/log" /var/log
mount -t overlay -o "lowerdir=$1/etc:/etc" none /etc
mount --bind /dev/null /dev/kmsg
exec setpriv --bounding-set -all --inh-caps -all {PROGRAM}
"""
_SETTINGS: Final = """[Journal]
Storage=volatile
Audit=
ReadKMsg=no
ForwardToWall=no
RateLimitIntervalSec=0
RuntimeMaxUse=16M
"""


class Journald:
    """One that runs. folder: what it has as /run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def socket(self) -> Path:
        return self._folder / "systemd/journal/socket"

    @property
    def stream(self) -> Path:
        """Where systemd connects the stderr of services."""
        return self._folder / "systemd/journal/stdout"

    def read(self, *matches: str) -> list[dict[str, object]]:
        """The entries that `journalctl` finds."""
        options = [f"--directory={self._folder}/log/journal", "--output=json", "--all"]
        command = [*packages.command("journalctl", "systemd"), *options, *matches]
        done = subprocess.run(command, capture_output=True, check=True, timeout=20)
        return [msgspec.json.decode(line, type=dict[str, object]) for line in done.stdout.splitlines()]


@contextmanager
def journald(folder: Path) -> Iterator[Journald]:
    """Runs in a folder until left. Needs root."""
    for name in ("run", "log", "etc/systemd"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/systemd/journald.conf").write_text(_SETTINGS)
    (folder / "etc/machine-id").write_text(f"{MACHINE}\n")
    installed = [] if Path(PROGRAM).exists() else packages.as_if_installed("systemd")
    unshare = ["unshare", "--mount", "--net", "--ipc", "--uts", "--propagation=private"]
    with subprocess.Popen([*installed, *unshare, "sh", "-c", _START, "sh", str(folder)]) as process:
        found = Journald(folder / "run")
        try:
            wait_for("journald listens", lambda: found.socket.exists() and found.stream.exists(), 20)
            yield found
        finally:
            process.terminate()
