"""Real processes that hold a device node open: one that is made for a test, by any number, at any place."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nri_gpu.stray.uses import DeviceNumber
from nri_gpu.system.process import Process, process_of

# Served by every Linux (memory devices), and open in hardly any process of the machine: /dev/zero and /dev/full.
MAJOR: Final = 1
ZERO, FULL = (MAJOR, 5), (MAJOR, 7)
HOLDER: Final = """\
import os, sys
for path in sys.argv[1:]:
    os.open(path, os.O_RDWR)
print("open", flush=True)
sys.stdin.read()
"""


def node(folder: Path, number: DeviceNumber) -> Path:
    """A device node of that number in a folder of the test's own."""
    path = folder / "node{}-{}".format(*number)
    if not path.exists():
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(*number))
    return path


@contextmanager
def holding(
    folder: Path, *numbers: DeviceNumber, script: str = HOLDER, before: Sequence[str] = ()
) -> Iterator[Process]:
    """A process that has nodes of these numbers open until the end. before: what its command line begins with."""
    command = [*before, sys.executable, "-I", "-c", script, *(str(node(folder, number)) for number in numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "open\n"
        process = process_of(child.pid)
        assert process
        yield process
        child.stdin.close()


@contextmanager
def cgroup_of(name: str) -> Iterator[Path]:
    """A cgroup for processes of the test, in the machine's first hierarchy, below one that no other run of it has."""
    top = _first_hierarchy()
    made = Path(tempfile.mkdtemp(prefix="nri-gpu-test-", dir=top)) / name
    try:
        made.mkdir(parents=True)
        yield made
    finally:
        while made != top:
            made.rmdir()
            made = made.parent


def path_in_proc(cgroup: Path) -> str:
    """How /proc shows that cgroup."""
    return f"/{cgroup.relative_to(_first_hierarchy())}"


def _first_hierarchy() -> Path:
    top = Path("/sys/fs/cgroup")
    return top if (top / "cgroup.controllers").exists() else top / "pids"


def into(cgroup: Path) -> list[str]:
    """How the command line of a process in that cgroup begins."""
    assert shutil.which("sh")
    return ["sh", "-c", f'echo $$ > "{cgroup}/cgroup.procs"; exec "$@"', "sh"]
