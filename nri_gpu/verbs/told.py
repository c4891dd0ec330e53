"""Work that is done when somebody says that something may be other now, and again a while after it failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable


async def work_when_told(told: asyncio.Event, work: Callable[[], Awaitable[bool]], *, retry_s: float) -> None:
    """Until cancelled. work: whether it went well. retry_s: after work that did not, unless told before."""
    while True:
        await told.wait()
        told.clear()
        if not await work():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await told.wait()
            told.set()
