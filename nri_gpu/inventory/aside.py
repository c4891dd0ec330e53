"""Reads of the kernel's and the driver's files, which may wait for ever: in a thread of their own, with a limit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from nri_gpu.domain.errors import InventoryError

T = TypeVar("T")
Limit = Callable[[float], AbstractAsyncContextManager[object]]  # asyncio.timeout, or a test's own clock


class Aside:
    """At most one thread at a time. One that does not come back is left behind, and not joined by a second.

    A thread of its own and not one of the loop's pool: the loop waits for those when it ends.
    """

    def __init__(self, limit_s: float, limit: Limit = asyncio.timeout) -> None:
        self._limit_s = limit_s
        self._limit = limit
        self._busy = ""

    async def run(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises. what: names it in a sentence.

        Raises: InventoryError, where it takes too long, or one before it still does.
        """
        if self._busy:
            raise InventoryError(f"{self._busy} has still not come to an end: see `dmesg` for tasks that hang")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._busy = what

        def finish(result: T | None, error: BaseException | None) -> None:
            self._busy = ""
            if done.done():  # nobody waits any more
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # there is no error, so it is a T

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=body, name="nri-gpu-aside", daemon=True).start()
        try:
            async with self._limit(self._limit_s):
                return await done
        except TimeoutError:
            raise InventoryError(f"{what} did not come to an end within {self._limit_s:g} s") from None
