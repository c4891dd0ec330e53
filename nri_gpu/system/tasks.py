"""Work that goes on next to the requests: tried until it succeeds, its faults logged once, waited for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec

from loguru import logger

from nri_gpu.domain.errors import Exit, RestartNeededError, fault_of
from nri_gpu.domain.phrases import FIXES

STUCK_S: Final = 300.0

P = ParamSpec("P")


class Backoff:
    """The pauses of an action that is tried until it works. jitter: the random share of each pause, from 0 to 1."""

    def __init__(self, first_s: float, longest_s: float, *, jitter: float = 0.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter
        self.failures = 0  # since the last `reset`

    def next_s(self) -> float:
        """Count a failure. Return the seconds to wait before the next attempt."""
        pause_s = min(self._first_s * 2.0 ** min(self.failures, 32), self._longest_s)
        self.failures += 1
        return pause_s * random.uniform(1 - self._jitter, 1)

    def reset(self) -> None:
        """Make the next pause the first again, after a success."""
        self.failures = 0


class LogOnce:
    """A logger of faults: each once until it changes, and once as an error after `stuck_s` seconds without `clear`.

    That error says what to do. fault: the one that was reported last, or empty if all is well; to report that is to
    clear.
    """

    def __init__(self, *, stuck_s: float = STUCK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.fault = ""
        self._stuck_s = stuck_s
        self._clock = clock
        self._since: float | None = None
        self._told = False

    def warning(self, phrase: str, fault: str, **fields: object) -> None:
        """Report a fault each time that it is met: it is logged with these fields if it differs from the last one.

        A field `fix` says what to do about this very fault, where the phrase's own does not fit each of its faults.
        """
        if not fault:
            self.clear()
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        lasting_s = now - self._since
        if lasting_s < self._stuck_s or self._told:
            self.note(phrase, fault, **fields)
            return
        self.fault, self._told = fault, True
        bound = logger.bind(**{"fix": FIXES.get(phrase, ""), **fields}, fault=fault, lasting_s=round(lasting_s))
        bound.error(phrase)

    def note(self, phrase: str, fault: str, **fields: object) -> None:
        """Report as `warning` does, but never as an error, however long the fault lasts."""
        if fault not in ("", self.fault):
            logger.bind(**fields, fault=fault).warning(phrase)
        self.fault = fault

    @contextmanager
    def guard(self, phrase: str, **fields: object) -> Iterator[None]:
        """Report an OSError of the block by `warning`, and go on behind it; without one all is well."""
        try:
            yield
        except OSError as error:
            self.warning(phrase, fault_of(error), **fields)
        else:
            self.clear()

    def clear(self) -> None:
        """Note that all is well: the next fault is logged, whichever it is."""
        self.fault, self._since, self._told = "", None, False


@contextmanager
def raised_alone(kind: type[Exception]) -> Iterator[None]:
    """Raise an exception of this kind without its group, if nothing else ended the task group.

    Python 3.11.2, which Debian 12 has, makes a group again of what is raised in a block of `except*`.
    """
    try:
        yield
    except ExceptionGroup as group:
        _, others = group.split(kind)
        if others:
            raise
        raise group.exceptions[0] from None


async def work_when_told(told: asyncio.Event, work: Callable[[], Awaitable[bool]], *, retry_s: float) -> None:
    """Do the work each time `told` is set, until cancelled.

    work: returns whether it succeeded. retry_s: seconds after which failed work is repeated, unless told before.
    """
    while True:
        await told.wait()
        told.clear()
        if not await work():
            await set_within(told, retry_s)
            told.set()


def later(action: Callable[[], object]) -> None:
    """Run something in the event loop's next turn: once the reply that is being made is on its way."""
    asyncio.get_running_loop().call_soon(action)


def tell(followers: Iterable[Callable[P, object]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call each follower, in order. An exception is its bug: it is logged by the follower's name, and ends nothing."""
    for follower in followers:
        try:
            follower(*args, **kwargs)
        except Exception as error:
            name = getattr(follower, "__qualname__", repr(follower))
            logger.bind(follower=name).opt(exception=error).error("bug: a follower of changes failed; the rest goes on")


async def set_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait for the event, as long as that at most. Return whether it is set. limit_s: None waits without end.

    One timer and no task: the idle daemon does little else than this.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(None if limit_s is None else due(limit_s)):
            await event.wait()
    return event.is_set()


def due(wait_s: float) -> float:
    """Return when a wait ends, by the loop's clock; one of a second or more up to half a second early or late.

    Such waits end at whole seconds, many of them at one: to wake an idle daemon costs more than what it does then.
    """
    end = asyncio.get_running_loop().time() + wait_s
    return float(round(end)) if 1 <= wait_s < math.inf else end


async def first_done(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return when one of the awaitables is done, or after that time. Cancel the rest, and wait until it has ended."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks, and return once they have ended, however they did."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def to_its_end(work: Awaitable[object]) -> None:
    """Wait for work that may not be left half done. A cancellation that came meanwhile is raised then.

    gRPC's `Server.stop` waits by `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes in the
    loop's turn in which the work ends: the task went on, and the process with it.
    """
    task = asyncio.current_task()
    assert task
    before = task.cancelling()
    await work
    if task.cancelling() > before:
        raise asyncio.CancelledError


def exit_code(parts: Iterable[asyncio.Task[None]]) -> Exit:
    """Return the exit code of a process with these tasks, and log a line for each that ended by a bug.

    Call it before the other tasks are cancelled. RestartNeededError ends the process on purpose, and is no bug.
    """
    died = [part for part in parts if part.done() and part.exception()]
    if needed := [part.exception() for part in died if isinstance(part.exception(), RestartNeededError)]:
        logger.bind(fault=str(needed[0])).error("exiting to be restarted")
        return Exit.UNAVAILABLE
    for part in died:
        logger.opt(exception=part.exception()).critical("bug: a task ended by an exception, so nri-gpu ends")
    return Exit.BUG if died else Exit.OK
