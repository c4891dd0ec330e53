"""sd_notify(3): ready, status, watchdog, stopping. Silent where there is no service manager. And a process's life."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping

from loguru import logger

from nri_gpu.domain.errors import Exit
from nri_gpu.system.tasks import cancelled, exit_code


class Notifier:
    """The datagram socket of the service manager that started us as `Type=notify`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for a NUL: the abstract namespace.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        if self._socket:
            self._socket.setblocking(False)
        usec = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if usec.isdecimal() and pid == str(os.getpid()) else None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """Send one line for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def feed_watchdog(self) -> None:
        """Feed the watchdog from the event loop from now on, so that the manager restarts us when the loop hangs."""
        if self.watchdog_s:
            self.alive()
            asyncio.get_running_loop().call_later(self.watchdog_s / 2, self.feed_watchdog)

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError:
            return  # a manager that is not there must not stop us from serving


def _one_line(status: str) -> str:
    """Join the lines of a status, perhaps the runtime's text: the manager reads each line as an assignment."""
    return " ".join(status.split())


async def run_until_told(
    serving: asyncio.Task[None], notifier: Notifier, ending: Callable[[], Awaitable[None]] | None = None
) -> Exit:
    """Serve until SIGTERM, SIGINT, or the task's own end. ending: awaited before the task is cancelled."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    notifier.feed_watchdog()
    stopping = asyncio.create_task(told.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = exit_code((serving,))
    notifier.stopping()
    if ending:
        await ending()
    await cancelled((serving, stopping))
    notifier.close()
    logger.info("stopped")
    return code
