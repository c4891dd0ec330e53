"""Work that is done when somebody says that something may be other now, and again a while after it failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from loguru import logger

from nri_gpu.domain.errors import Exit, RestartNeededError


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


def exit_code(parts: Iterable[asyncio.Task[None]]) -> Exit:
    """How the verb ends, with a line for each part that died of a bug. Asked before the others are cancelled.

    One that needs the process started again ends it on purpose, and is no bug.
    """
    died = [part for part in parts if part.done() and part.exception()]
    if needed := [part.exception() for part in died if isinstance(part.exception(), RestartNeededError)]:
        logger.bind(fault=str(needed[0])).error("ending, to be started again")
        return Exit.UNAVAILABLE
    for part in died:
        logger.opt(exception=part.exception()).critical("bug: a part of nri-gpu died, so all of it ends")
    return Exit.BUG if died else Exit.OK
