"""Processes, watched through pidfds."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import suppress

from nri_gpu.system.proc import PROC
from nri_gpu.system.process import Process, find_process


class ProcessWatch:
    """A watch on one process through a descriptor that is readable once it ended. Source: pidfd_open(2).

    ended: set then, by the event loop that the watch was made in.
    """

    def __init__(self, process: Process) -> None:
        """Begin the watch. Raises: ProcessLookupError: the process is gone; OSError: it cannot be watched."""
        self.process = process
        self.fd = os.pidfd_open(process.pid)
        try:
            if find_process(process.pid, PROC) != process:  # it ended meanwhile, and another process may have its PID
                raise ProcessLookupError(process.pid)
        except OSError:
            os.close(self.fd)
            raise
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._on_end)

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended, by one system call."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to exactly this process, or nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        self._loop.remove_reader(self.fd)
        os.close(self.fd)

    def _on_end(self) -> None:
        self._loop.remove_reader(self.fd)  # it stays readable
        self.ended.set()
