"""`make test-fresh`: the README's two commands on a machine that has nothing but git, make and Python with venv.

python -m tests.fresh SUITE TARGET...     such as: bookworm demo "pytest WHICH=tests/unit"

A clean Debian of that suite, with a clone of this commit in it, entered as a container is. It shares this machine's
kernel, /dev, /sys and network, and nothing else: no cache, no installed package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support import debian_root
from tests.support.errors import HarnessError

ROOT: Final = Path(__file__).parents[1]
HAS: Final = ("git", "make", "python3-venv")
# A path as people have them: blanks, and longer than a socket's may be.
CLONE: Final = "/opt/a path with blanks/" + "long/" * 24 + "nri-gpu"
# How this machine reaches its registries, and whether it is CI. Behind a proxy of its own, PIP_CERT is that one's file.
HANDED_ON: Final = ("PIP_CERT", "PIP_INDEX_URL", "http_proxy", "https_proxy", "no_proxy", "CI")
# $1: the folder; then the command, which is the first process of its own.
ENTER: Final = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
shift
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=0755 tmpfs run
cp /etc/resolv.conf /etc/hosts etc/
pivot_root . mnt
umount -l /mnt
exec "$@"
"""


def run(suite: str, targets: Sequence[str]) -> bool:
    """Run make's targets one after the other, and return whether all of them succeeded."""
    base = debian_root.made(suite, "minbase", HAS)
    with tempfile.TemporaryDirectory(prefix="nri-gpu-fresh-", dir="/var/tmp") as name:
        folder = Path(name) / "root"
        subprocess.run(["cp", "-a", base, folder], check=True)
        if certificates := os.environ.get("PIP_CERT"):
            copy = folder / certificates.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(certificates, copy)
        clone = folder / CLONE.lstrip("/")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        return all(_make(folder, suite, target) for target in targets)


def _make(folder: Path, suite: str, target: str) -> bool:
    own = debian_root.ENVIRONMENT | {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    began = time.monotonic()
    enter = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    command = [*enter, "enter", str(folder), "make", "-C", CLONE, *shlex.split(target)]
    done = subprocess.run(command, env=own, stdin=subprocess.DEVNULL, check=False)
    said = "ok" if not done.returncode else f"failed with {done.returncode}"
    print(f"{suite}: make {target}: {said} after {time.monotonic() - began:.0f} s", flush=True)
    return not done.returncode


def main() -> int:
    """Return an exit code."""
    parser = ArgumentParser(prog="python -m tests.fresh", description=__doc__)
    parser.add_argument("suite", help="of Debian, 12 or newer")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    given = parser.parse_args()
    if os.geteuid() or not shutil.which("git"):
        print("a clean system needs root, and git to clone this checkout into it", file=sys.stderr)
        return 1
    try:
        return 0 if run(given.suite, given.targets) else 1
    except HarnessError as fault:
        print(fault, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
