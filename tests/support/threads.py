"""A real program whose threads come and go, so that its first one can end before the others."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from nri_gpu.system.proc import PROC, parse_stat
from tests.support.driver_root import compile_stub
from tests.support.waiting import wait_for

STARTS_S = 10.0


@cache
def program() -> Path:
    """Return the program, linked statically: a container has it without libraries."""
    return compile_stub(Path(__file__).with_name("threads.c"), Path(mkdtemp()) / "threads", "", "-static", "-pthread")


def living(pid: int) -> frozenset[int]:
    """Return the threads of a process that have not ended, by what the kernel says of each."""
    folder = PROC / str(pid) / "task"
    found = set()
    for each in folder.iterdir() if folder.exists() else ():
        try:
            if parse_stat((each / "stat").read_text()).state not in "ZX":
                found.add(int(each.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return frozenset(found)


def wait_started(pid: int) -> None:
    """Wait until the process is this program, and takes its signals: a container's is runc before."""
    exe, status = PROC / str(pid) / "exe", PROC / str(pid) / "status"

    def takes_signals() -> bool:
        (mask,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        return exe.readlink().name == program().name and bool(int(mask, 16) & 1 << signal.SIGUSR2 - 1)

    wait_for("the program", takes_signals, STARTS_S)


def start_thread(pid: int) -> None:
    before = living(pid)
    os.kill(pid, signal.SIGUSR2)
    wait_for("another thread", lambda: living(pid) > before, STARTS_S)


def end_thread(pid: int, thread: int) -> None:
    assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGUSR1) == 0
    wait_for("the thread's end", lambda: thread not in living(pid), STARTS_S)


def end_first(pid: int) -> None:
    """Let a thread outlive the first one."""
    start_thread(pid)
    end_thread(pid, pid)


def started() -> subprocess.Popen[str]:
    """Start the program with one thread."""
    child = subprocess.Popen([program()], text=True)
    wait_started(child.pid)
    return child
