"""The log as values: what was said, with which fields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from msgspec import Struct

from nri_gpu.system.log import LEVELS, RECORDS, TRACE


class Line(Struct, frozen=True):
    """One record. fault: text of the exception logged with it, if any."""

    level: str
    text: str
    fields: dict[str, Any]
    exception: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.level} {self.text} {self.fields}"


class Heard(logging.Handler):
    def __init__(self, take: Callable[[Line], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        self._take(Line(record.levelname, record.getMessage(), dict(record.__dict__["fields"]), raised))


@contextmanager
def hearing(take: Callable[[Line], None], level: str = "TRACE") -> Iterator[None]:
    """Each line is given to `take`, beside whoever else has it."""
    handler = Heard(take)
    handler.setLevel(LEVELS[level])
    before = RECORDS.level
    RECORDS.addHandler(handler)
    RECORDS.setLevel(TRACE)
    try:
        yield
    finally:
        RECORDS.removeHandler(handler)
        RECORDS.setLevel(before)


@dataclass
class Log:
    """Takes the place of every other handler while it is entered."""

    lines: list[Line] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._before = RECORDS.handlers[:], RECORDS.level
        RECORDS.handlers[:] = [Heard(self.lines.append)]
        RECORDS.setLevel(TRACE)
        return self

    def __exit__(self, *_: object) -> None:
        RECORDS.handlers[:], level = self._before
        RECORDS.setLevel(level)

    def said(self, text: str) -> list[Line]:
        """Every line of that text."""
        return [line for line in self.lines if line.text == text]

    def one(self, text: str) -> Line:
        """The only line of that text."""
        (line,) = self.said(text)
        return line

    def warnings(self) -> list[Line]:
        """What somebody should act on."""
        return [line for line in self.lines if line.level in ("WARNING", "ERROR", "CRITICAL")]
