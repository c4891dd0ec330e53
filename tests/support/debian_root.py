"""Clean Debian systems to install packages in: a root folder of a suite, overlaid, in namespaces of its own.

    with DebianRoot("bookworm") as root:
        root.run("apt", "install", "./nri-gpu_0.1.0_amd64.deb")

The base is made once by mmdebstrap, which is a debootstrap that lets apt do the work (a third of its time), and kept in
the cache folder. What is changed is in memory and gone with the object. Nothing of the machine's root is touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.support import apt, packages
from tests.support.cache import cache_folder, kept
from tests.support.errors import HarnessError

MAKE_TIMEOUT_S: Final = 600.0
RUN_TIMEOUT_S: Final = 120.0
ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
# Both kinds of machines: with systemd, which runs in tests.support.booted_root alone, and without it.
INCLUDED: Final = {"bookworm": ("python3", "systemd"), "trixie": ("python3",)}
ENTERED: Final = ("--mount", "--pid", "--uts", "--ipc", "--net")
# $1: the lower layers; $2: an empty folder to mount on; $3: a folder for what is changed, or nothing: in memory; then
# pairs of a folder and where it is to be seen. Whatever is mounted is private to this process, which is the first one
# of its processes too, and takes all others with it.
MOUNTS: Final = """
set -e
mount --make-rprivate /
lower=$1 work=$2 changed=${3:-$2}; shift 3
mount -t tmpfs -o mode=0755 tmpfs "$work"
mkdir "$changed/upper" "$changed/work" "$work/root"
mount -t overlay -o "lowerdir=$lower,upperdir=$changed/upper,workdir=$changed/work" overlay "$work/root"
mount -t proc proc "$work/root/proc"
mount -t tmpfs -o mode=0755 tmpfs "$work/root/run"
while [ $# -gt 0 ]; do
    mkdir -p "$work/root$2"; mount --bind "$1" "$work/root$2"; shift 2
done
"""
WAIT: Final = """
exec chroot "$work/root" sh -c 'echo ready; exec cat'
"""


def base(suite: str, included: Sequence[str] = ()) -> Path:
    """A folder with that suite's essential packages, apt and what is included. Raises: HarnessError."""
    return made(suite, "apt", included or INCLUDED[suite])


def made(suite: str, variant: str, included: Sequence[str]) -> Path:
    """A folder with a Debian. variant: what is in it at least, as mmdebstrap names it. Raises: HarnessError."""
    folder = cache_folder() / "roots" / "-".join((suite, variant, *included))
    return kept(folder, lambda unfinished: _make(suite, variant, included, unfinished))


def _make(suite: str, variant: str, included: Sequence[str], folder: Path) -> None:
    # In a mount namespace of its own: it mounts proc and others for the time of its work.
    program = packages.command("mmdebstrap")
    command = ["unshare", "--mount", *program, "--quiet", "--mode=root", f"--variant={variant}"]
    command.append(f"--include={','.join(included)}")
    fast = ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"']
    snapshot = ['--aptopt=Acquire::Check-Valid-Until "false"']  # as a mirror may be; its signature counts
    try:
        subprocess.run(
            [*command, *fast, *snapshot, suite, folder, apt.archives()[0].site],
            capture_output=True,
            text=True,
            check=True,
            timeout=MAKE_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as fault:
        raise HarnessError(f"mmdebstrap {suite} failed: {fault.stderr[-2000:]}") from fault


class DebianRoot:
    """One system, from `open` (or `with`) on. seen: folders of the machine -> where they are in it.

    included: packages beside apt, other than the suite's own. host_processes: with the machine's own processes in its
    /proc, instead of only its own. changed: an empty folder, to keep in it what is changed; over: such a folder of
    another system, to begin with.
    """

    def __init__(
        self,
        suite: str,
        seen: Mapping[Path, str] | None = None,
        *,
        included: Sequence[str] = (),
        host_processes: bool = False,
        changed: Path | None = None,
        over: Path | None = None,
    ) -> None:
        self.suite = suite
        self._included = included
        self._script = MOUNTS + WAIT
        self._changed = str(changed or "")
        self._over = [f"{over}/upper"] if over else []
        self._seen = [str(word) for pair in (seen or {}).items() for word in pair]
        self._namespaces = ["--mount"] if host_processes else ["--mount", "--pid", "--fork", "--kill-child"]
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        lower = ":".join([*self._over, str(base(self.suite, self._included))])
        self._work = tempfile.mkdtemp(prefix="ng-root-")
        places = (lower, self._work, self._changed, *self._seen)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "unshare", *self._namespaces, "sh", "-c", self._script, "init", *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        if self._process.stdout.readline() != "ready\n":
            self.__exit__()
            raise HarnessError(f"no {self.suite} could be mounted; this needs root and overlayfs")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._pid = int(children[0]) if "--fork" in self._namespaces else self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=RUN_TIMEOUT_S)
        with contextlib.suppress(OSError):
            Path(self._work).rmdir()

    @property
    def path(self) -> Path:
        """Its `/`, as the machine sees it."""
        return Path(f"/proc/{self._pid}/root")

    def command(self, *words: str) -> list[str]:
        """What runs words in it."""
        # With --pid, nsenter is another process than what it runs.
        inside = [f"--target={self._pid}", "--root", "--wd", *(each for each in self._namespaces if each in ENTERED)]
        return ["nsenter", *inside, "env", *(f"{key}={value}" for key, value in ENVIRONMENT.items()), *words]

    def try_run(self, *words: str, answers: str = "") -> subprocess.CompletedProcess[str]:
        """Run it, and return how it ended. What it printed is all in stdout, in its order.

        answers: what it reads.
        """
        return subprocess.run(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            input=answers,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_S,
        )

    def run(self, *words: str) -> str:
        """What it printed. Raises: AssertionError when it fails."""
        done = self.try_run(*words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def files(self) -> set[str]:
        """Every path on its own file system, but for apt's and dpkg's logs and caches."""
        left_out = ("/var/log/", "/var/cache/", "/var/lib/apt/", "/var/lib/dpkg/")
        return {path for path in self.run("find", "/", "/run", "-xdev").splitlines() if not path.startswith(left_out)}


def kill_group(process: subprocess.Popen[bytes], signals: Sequence[int]) -> None:
    """Signals to all of a session that was started for it, and its end."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    process.wait(timeout=RUN_TIMEOUT_S)
