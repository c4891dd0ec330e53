"""A server of the daemon's, on its socket while a test lasts; and clients of other users."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from nri_gpu.system.server import Service, serve
from nri_gpu.system.tasks import cancelled


@asynccontextmanager
async def served(listener: socket.socket, service: Service) -> AsyncIterator[None]:
    task = asyncio.create_task(serve(listener, service))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        await cancelled([task])


def connected(path: Path, uid: int = 0, gid: int = 0) -> socket.socket:
    """Return a client of that user, which waits for nothing. Needs root."""
    client = socket.socket(socket.AF_UNIX)
    with _user(uid, gid):
        client.connect(str(path))
    client.setblocking(False)
    return client


@contextmanager
def _user(uid: int, gid: int) -> Iterator[None]:
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
