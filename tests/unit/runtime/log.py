"""The log as values: what was said, with which fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from loguru import logger
from msgspec import Struct


class Line(Struct, frozen=True):
    """One record. fault: text of the exception logged with it, if any."""

    level: str
    text: str
    fields: dict[str, Any]
    exception: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.level} {self.text} {self.fields}"


@dataclass
class Log:
    """Takes the place of every other sink while it is entered."""

    lines: list[Line] = field(default_factory=list)

    def __enter__(self) -> Self:
        logger.remove()
        self._id = logger.add(self._keep, level="TRACE", format="{message}")
        return self

    def __exit__(self, *_: object) -> None:
        logger.remove(self._id)

    def _keep(self, message: Any) -> None:  # noqa: ANN401 - loguru's Message exists for type checkers only
        record = message.record
        raised = record["exception"].value if record["exception"] else None
        self.lines.append(Line(record["level"].name, record["message"], dict(record["extra"]), raised))

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
