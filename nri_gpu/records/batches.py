"""Notes that one thread writes, a moment after they were made: neither a reply nor the event loop waits for a disk.

As one thread takes all batches, lines stand in the order in which they were noted.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

DELAY_S: Final = 0.25
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
N = TypeVar("N")


class Batches(Generic[N]):
    """The notes in memory, and the thread. write: called in it with each batch; it raises nothing.

    delay_s: from a note to its batch, in seconds.
    """

    def __init__(self, write: Callable[[deque[N]], None], thread: str, delay_s: float = DELAY_S) -> None:
        self.notes: deque[N] = deque()  # that no batch has yet
        self._write = write
        self._delay_s = delay_s
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._timer: asyncio.TimerHandle | None = None
        self._batch: Future[None] | None = None  # that the thread took last
        self._thread = ThreadPoolExecutor(1, thread)

    def note(self, note: N) -> None:
        self.notes.append(note)
        self._soon()

    async def run(self) -> None:
        """Write until cancelled, and then the notes that are left."""
        self._loop = asyncio.get_running_loop()
        self._soon()
        try:
            await self._loop.create_future()
        finally:
            self._loop = None
            if self._timer:
                self._timer.cancel()
            await self.written()
            while self.notes:  # of tasks that end beside this one
                await self.written()
            self._thread.shutdown(wait=False)

    async def written(self) -> None:
        """Return when every note is written, or could not be."""
        await asyncio.shield(asyncio.wrap_future(self._write_batch()))

    def _soon(self) -> None:
        if self._loop and self.notes and not self._timer:
            self._timer = self._loop.call_later(self._delay_s, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        if self._batch and not self._batch.done():  # no second one waits in memory for a disk that hangs
            self._soon()
        elif self.notes:
            self._write_batch()

    def _write_batch(self) -> Future[None]:
        """Let the thread write what was noted, behind what it has."""
        notes, self.notes = self.notes, deque()
        self._batch = self._thread.submit(self._write, notes)
        return self._batch


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of ours to append to, made if it is not there. Behind a line that was cut short a new one begins.

    Raises: OSError, also for a link.
    """
    cut_short = _is_cut_short(path)
    file = open(os.open(path, _FLAGS, 0o600), "ab")  # noqa: PTH123, SIM115 - with a mode of our own; for the caller
    if cut_short:
        file.write(b"\n")
    return file


def _is_cut_short(path: Path) -> bool:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
    except OSError:  # it is empty or not there
        return False
