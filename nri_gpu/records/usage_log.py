"""The writer of usage.jsonl, which says who had which GPU, from when to when (usage_lines.py).

As with the audit log, a thread writes what was noted, a moment later. Before the file is too large or too old, it is
put aside and a new one begun. Each begins with the holds that are open, so that the oldest can go.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import fault_of
from nri_gpu.ledger.holds import End
from nri_gpu.records.batches import DELAY_S, Batches, open_to_append
from nri_gpu.records.usage_lines import (
    Begun,
    Cordoned,
    HeldDevice,
    HoldEnded,
    LogMoment,
    Open,
    UsageLine,
    decoded,
    encoded,
)
from nri_gpu.system.storage import NotPrivateError, stat_of, why_untrusted

FILE: Final = "usage.jsonl"
PARTS: Final = 8  # files that together have what is kept; the oldest goes whole
OPEN_EVERY_S: Final = 3600.0
DAY_S: Final = 86_400
WAITING_MAX: Final = 2000  # notes, on a disk that hangs; beyond that all that is open is noted anew
_LINE_MAX: Final = 8192  # bytes; ours are shorter


class _Anew(Struct, frozen=True):
    """A list of all holds that are open, noted once more: what is not in it is over."""

    now: LogMoment
    holds: tuple[Begun, ...]


_Note = Begun | HoldEnded | Cordoned | LogMoment | _Anew  # a moment: the open holds are listed


class UsageLog:
    """The record of holds. Nothing here raises: a fault of the disk is logged once, and ends nothing but the record.

    now: of this boot. keep_days, keep_mib: what is older, or more, is deleted.
    """

    def __init__(
        self,
        folder: Path,
        boot: str,
        now: Callable[[], LogMoment],
        *,
        keep_days: int,
        keep_mib: int,
        delay_s: float = DELAY_S,
    ) -> None:
        self._path = folder / FILE
        self._boot = boot
        self._now = now
        self._keep_s = keep_days * DAY_S
        self._keep_bytes = keep_mib << 20
        self._batches = Batches[_Note](self._write, "nri-gpu-usage", delay_s)
        self.written = self._batches.written
        self._holds = dict[str, Begun]()  # that are open, by what was noted
        # What follows is the thread's.
        self._begun = True  # all that is open is in the newest file, or will be by the first note
        self._open = dict[str, Begun]()
        self._fault = ""  # that was logged last

    def anew(self, holds: Iterable[Begun]) -> None:
        """Note all holds that are open. Whatever else is open in the file has ended meanwhile."""
        self._holds = {each.hold: each for each in holds}
        self._note_anew()

    def begun(self, hold: Begun) -> None:
        self._holds[hold.hold] = hold
        self._note(hold)

    def ended(self, hold: str, why: End, now: LogMoment) -> None:
        self._holds.pop(hold, None)
        self._note(HoldEnded(boot=self._boot, at_s=now.at_s, mono_s=now.mono_s, hold=hold, why=why))

    def cordoned(self, device: HeldDevice, by: str, why: str, since_s: float, ended: str) -> None:
        """Note that root took a GPU out of use, or how it came back: as of `Cordoned`."""
        now = self._now()
        line = Cordoned(
            boot=self._boot,
            at_s=now.at_s,
            mono_s=now.mono_s,
            device=device,
            by=by,
            why=why,
            since_s=since_s,
            ended=ended,
        )
        self._note(line)

    async def run(self) -> None:
        """Write until cancelled, and then what is left. Each hour the open holds are listed."""
        listing = asyncio.create_task(self._list_open())
        try:
            await self._batches.run()
        finally:
            listing.cancel()

    async def _list_open(self) -> None:
        while True:
            await asyncio.sleep(OPEN_EVERY_S)
            self._note(self._now())

    def _note(self, note: _Note) -> None:
        if len(self._batches.notes) < WAITING_MAX:
            self._batches.note(note)
        else:
            self._batches.notes.clear()
            self._note_anew()

    def _note_anew(self) -> None:
        self._batches.note(_Anew(self._now(), tuple(self._holds.values())))

    def _write(self, notes: deque[_Note]) -> None:
        """Write the lines of the notes, in the thread."""
        try:
            self._turn()
            lines = [*([] if self._begun else self._restated(self._now())), *self._lines(notes)]
            self._begun = True
            self._append(lines)
        except OSError as error:
            self._failed(fault_of(error))
        except Exception as error:
            self._failed(repr(error), error)
        else:
            self._fault = ""

    def _lines(self, notes: Iterable[_Note]) -> Iterator[UsageLine]:
        for note in notes:
            match note:
                case Begun():
                    self._open[note.hold] = note
                    yield note
                case HoldEnded():
                    self._open.pop(note.hold, None)
                    yield note
                case Cordoned():
                    yield note
                case _Anew(now, holds):
                    self._open = {each.hold: each for each in holds}
                    yield from self._restated(now)
                case LogMoment():
                    yield self._listed(note)

    def _restated(self, now: LogMoment) -> Iterator[UsageLine]:
        yield self._listed(now)  # first: what it lacks was last known by the line before
        yield from (replace(each, at_s=now.at_s, mono_s=now.mono_s) for each in self._open.values())

    def _listed(self, now: LogMoment) -> Open:
        return Open(boot=self._boot, at_s=now.at_s, mono_s=now.mono_s, holds=tuple(self._open))

    def _append(self, lines: Iterable[UsageLine]) -> None:
        if (found := stat_of(self._path)) and (why := why_untrusted(found)):
            raise NotPrivateError(self._path, why)
        with open_to_append(self._path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(b"".join(map(encoded, lines)))

    def _turn(self) -> None:
        """Put a file aside that has its part of what may be kept; delete the oldest, and those that are too old."""
        found, now_s = stat_of(self._path), self._now().at_s
        if not found:
            return
        first = first_line(self._path)
        age_s = now_s - first.at_s if first else 0.0
        if found.st_size < self._keep_bytes // PARTS and age_s < self._keep_s / PARTS:
            return
        files = aside(self._path)
        for number, file in reversed([*enumerate(files, 1)]):
            if number + 1 >= PARTS or now_s - file.stat().st_mtime > self._keep_s:
                file.unlink()
            else:
                file.replace(_aside(self._path, number + 1))
        self._path.replace(_aside(self._path, 1))
        self._begun = False

    def _failed(self, fault: str, bug: Exception | None = None) -> None:
        self._begun = False  # something is missing
        if self._fault != fault:
            self._fault = fault
            bound = logger.bind(path=str(self._path), fault=fault).opt(exception=bug)
            bound.error("usage not recorded; nothing else depends on it")


def aside(newest: Path) -> list[Path]:
    """Return the files that were put aside, the youngest first."""
    files: list[Path] = []
    for number in count(1):
        if not (file := _aside(newest, number)).exists():
            break
        files.append(file)
    return files


def _aside(newest: Path, number: int) -> Path:
    return newest.with_suffix(f".{number}.jsonl")


def first_line(file: Path) -> UsageLine | None:
    """Return the first line that can be read, or None."""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        return next((line for each in stream.readlines(_LINE_MAX) if (line := decoded(each))), None)
    return None
