"""Waiting for a fact, never for a time."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tests.support.errors import HarnessError

T = TypeVar("T")

POLL_S: Final = 0.01
LOOP_S: Final = 300.0  # before what hangs fails; the longest tests take a minute, on a busy machine several


def wait_for(
    what: str, ready: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = str, *, poll_s: float = POLL_S
) -> None:
    """Ask `ready` until it says yes. Raises: HarnessError after `timeout_s` seconds, with what `explain` knows."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise HarnessError(f"{what}: still waiting after {timeout_s:.0f} s. {explain()}")
        time.sleep(poll_s)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A coroutine as a test, with a deadline."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LOOP_S):
                await test(*arguments, **named)

        asyncio.run(bounded())

    return run


async def aside(blocking: Callable[..., T], *arguments: object, **named: object) -> T:
    """A blocking step of a test, while its loop goes on."""
    return await asyncio.to_thread(blocking, *arguments, **named)
