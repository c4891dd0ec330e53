"""Processes by their numbers, as /proc tells of them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from msgspec import Struct


class Process(Struct, frozen=True):
    """A process that will not be taken for another of the same number. started: clock ticks since boot."""

    pid: int
    started: int


def process_of(pid: int) -> Process | None:
    """The process of that number; None where there is none, or only what is left of one. Source: proc(5), stat."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a program's name may hold blanks and parentheses
    return None if state in ("Z", "X") else Process(pid, int(fields[18]))


def user_of(pid: int) -> int | None:
    """The effective user id of a process as the host counts; None where /proc does not tell."""
    if pid <= 0:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("Uid:")), [])
    return int(found[2]) if len(found) == 5 else None


class Watch:
    """One living process, ours or not, held by a descriptor that is readable once it ended. Source: pidfd_open(2).

    ended: set then. Belongs to the loop that it was made in.
    """

    def __init__(self, process: Process) -> None:
        """Raises: OSError: it is gone."""
        self.process = process
        self.fd = os.pidfd_open(process.pid)
        if process_of(process.pid) != process:  # ended in between, and its number may be another's by now
            os.close(self.fd)
            raise ProcessLookupError(process.pid)
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._gone)

    @property
    def alive(self) -> bool:
        """Whether it has not ended. One system call."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> None:
        """A signal to this very process; nothing where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        """Let go of it."""
        self._loop.remove_reader(self.fd)
        os.close(self.fd)

    def _gone(self) -> None:
        self._loop.remove_reader(self.fd)  # it stays readable
        self.ended.set()
