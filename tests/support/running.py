"""A coroutine that runs beside a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    """In the end it is cancelled and waited for."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
