"""The log, as everything that looks outside writes it: a fixed phrase, and facts as fields.

    logger.bind(gpu_uuid=uuid, rule=rule.name).info("gpu granted")

Records are the standard library's, which asyncio has imported anyway; `telemetry.py` says where they go. Until it is
asked to, warnings go to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final

TRACE: Final = 5
LEVELS: Final = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}
RECORDS: Final = logging.getLogger("nri_gpu")


class Logger:
    """Says things with fields. Immutable: `bind` and `opt` give another one."""

    __slots__ = ("_exception", "_fields")

    def __init__(self, fields: Mapping[str, object], exception: BaseException | bool | None = None) -> None:
        self._fields = fields
        self._exception = exception

    def bind(self, **fields: object) -> Logger:
        """With these fields, too."""
        return Logger({**self._fields, **fields}, self._exception)

    def opt(self, *, exception: BaseException | bool | None) -> Logger:
        """With the traceback of an exception. True: of the one that is being handled."""
        return Logger(self._fields, exception)

    def log(self, level: str, phrase: str) -> None:
        """One line. level: a name of LEVELS; another one is a warning's."""
        number = LEVELS.get(level, logging.WARNING)
        if RECORDS.isEnabledFor(number):
            record = RECORDS.makeRecord(RECORDS.name, number, "", 0, phrase, (), self._raised())
            record.fields = self._fields
            RECORDS.handle(record)

    def debug(self, phrase: str) -> None:
        """For who looks for a fault."""
        self.log("DEBUG", phrase)

    def info(self, phrase: str) -> None:
        """What happened."""
        self.log("INFO", phrase)

    def warning(self, phrase: str) -> None:
        """Somebody may want to act."""
        self.log("WARNING", phrase)

    def error(self, phrase: str) -> None:
        """Something does not work."""
        self.log("ERROR", phrase)

    def critical(self, phrase: str) -> None:
        """Nothing works."""
        self.log("CRITICAL", phrase)

    def _raised(self) -> logging._SysExcInfoType | None:
        raised = self._exception
        if isinstance(raised, BaseException):
            return type(raised), raised, raised.__traceback__
        return sys.exc_info() if raised else None


class _Plain(logging.Handler):
    """For commands that people look at."""

    def emit(self, record: logging.LogRecord) -> None:
        """With every field as it is."""
        fields = "".join(f" {name}={value}" for name, value in record.__dict__.get("fields", {}).items())
        sys.stderr.write(f"{record.levelname: <7} {record.getMessage()}{fields}\n")


logging.addLevelName(TRACE, "TRACE")
RECORDS.propagate = False
RECORDS.addHandler(_Plain(logging.WARNING))
logger: Final = Logger({})
