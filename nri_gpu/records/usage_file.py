"""The reader of usage.jsonl, and of the files put aside before it: what began and ended, also where a line lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from nri_gpu.ledger.holds import End
from nri_gpu.records.usage_lines import Begun, Cordoned, HoldEnded, LogMoment, UsageLine, decoded
from nri_gpu.records.usage_log import FILE, aside


class Ending(Struct, frozen=True):
    """The end of a hold. why: None where no line has its end: `now` is when it was last known."""

    hold: str
    why: End | None
    now: LogMoment


class UsageReader:
    """The events of a folder's record, in their order. skipped: lines that are damaged, or of a later version."""

    def __init__(self, folder: Path) -> None:
        self._newest = folder / FILE
        self.skipped = 0
        self.open = dict[str, Begun]()
        self.cordons = dict[tuple[str, float], Cordoned]()  # by GPU and when that began; the last line of each
        self.boot = ""  # of the last line
        self.last = LogMoment(0.0, 0.0)

    def events(self) -> Iterator[Begun | Ending]:
        """Yield what happened. Raises: OSError."""
        for line in self._lines():
            if line.boot != self.boot:
                yield from self._close(self.open)
                self.boot = line.boot
            yield from self._taken(line)
            self.last = LogMoment(line.mono_s, line.at_s)

    def _taken(self, line: UsageLine) -> Iterator[Begun | Ending]:
        match line:
            case Begun():
                if line.hold not in self.open:
                    self.open[line.hold] = line
                    yield line
            case HoldEnded():
                if line.hold in self.open:
                    del self.open[line.hold]
                    yield Ending(line.hold, line.why, LogMoment(line.mono_s, line.at_s))
            case Cordoned():
                self.cordons[line.device.uuid, line.since_s] = line
            case _:
                yield from self._close(self.open.keys() - {*line.holds})

    def _close(self, holds: Iterable[str]) -> Iterator[Ending]:
        for hold in [*holds]:
            del self.open[hold]
            yield Ending(hold, None, self.last)

    def _lines(self) -> Iterator[UsageLine]:
        for file in (*reversed(aside(self._newest)), self._newest):
            with file.open("rb") as stream:
                for each in stream:
                    if line := decoded(each):
                        yield line
                    else:
                        self.skipped += bool(each.strip())
