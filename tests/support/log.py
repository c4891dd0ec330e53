"""The log as values: what was said, with which fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from loguru import logger
from msgspec import Struct

if TYPE_CHECKING:
    from loguru import Message


class Line(Struct, frozen=True):
    """One record. fault: text of the exception logged with it, if any."""

    level: str
    text: str
    fields: dict[str, Any]
    exception: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.level} {self.text} {self.fields}"


@contextmanager
def log_lines(take: Callable[[Line], None], level: str = "TRACE") -> Iterator[None]:
    """Each line is given to `take`, beside whoever else has it."""

    def sink(message: Message) -> None:
        record = message.record
        raised = record["exception"]
        take(Line(record["level"].name, record["message"], dict(record["extra"]), raised.value if raised else None))

    handler = logger.add(sink, level=level, format=lambda _: "", catch=False)
    try:
        yield
    finally:
        logger.remove(handler)


@dataclass
class Log:
    """Collects every line while it is entered."""

    lines: list[Line] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._collecting = log_lines(self.lines.append)
        self._collecting.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401 - as contextlib has them
        self._collecting.__exit__(*raised)

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
