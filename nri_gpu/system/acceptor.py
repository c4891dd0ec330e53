"""Accepts the connections of a listening socket, also after the process had no file descriptors left."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.system.tasks import LogOnce, cancelled

ACCEPT_AGAIN_S: Final = 1.0  # after there was no file descriptor for a connection
CALM_S: Final = 5.0  # so long without that fault, and it is over
BACKLOG: Final = 100


def listen(path: Path) -> socket.socket:
    """A Unix socket that listens, for root alone, in place of any that is there. Raises: OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Before bind(2), which gives the file the socket's own mode (Linux: net/unix/af_unix.c).
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Acceptor:
    """Accepts from when it is made to `close`, in the running event loop.

    name, path: of the socket, in the log. serve: runs as a task for each connection, and closes it.
    """

    def __init__(
        self,
        name: str,
        path: str,
        listener: socket.socket,
        serve: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._name = name
        self._path = path
        self._listener = listener
        self._serve = serve
        self._faults = LogOnce()
        self._refused = 0  # connections without a descriptor
        self._pause: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self._serving: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept)

    @property
    def serving(self) -> int:
        return len(self._serving)

    async def close(self) -> None:
        """Stop listening, and end what is being served."""
        asyncio.get_running_loop().remove_reader(self._listener)
        for timer in (self._pause, self._calm):
            if timer:
                timer.cancel()
        self._listener.close()
        await cancelled(self._serving)

    def _accept(self) -> None:
        """Accept one connection. asyncio's own server logs a hundred tracebacks a second when descriptors run out."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            fault = f"{error.strerror}; trying again each second"
            self._faults.warning("socket accepts no connections", fault, name=self._name, path=self._path)
            self._refused += 1
            if self._calm:
                self._calm.cancel()
                self._calm = None
            loop.remove_reader(self._listener)
            self._pause = loop.call_later(ACCEPT_AGAIN_S, loop.add_reader, self._listener, self._accept)
            return
        if self._refused and self._calm is None:
            self._calm = loop.call_later(CALM_S, self._over)
        task = loop.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _over(self) -> None:
        bound = logger.bind(name=self._name, path=self._path, attempt=self._refused)
        bound.info("socket accepts connections again")
        self._faults.clear()
        self._refused, self._calm = 0, None
