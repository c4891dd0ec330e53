"""Faults that last are logged once, not at each attempt."""

from __future__ import annotations

from loguru import logger


class LogOnce:
    """Logs a fault unless it is the one that was reported last. fault: that one; empty where all is well."""

    def __init__(self) -> None:
        self.fault = ""

    def warning(self, phrase: str, fault: str, **fields: object) -> None:
        """Report a fault: one line with these fields where it is another one."""
        if fault != self.fault:
            logger.bind(**fields, fault=fault).warning(phrase)
        self.fault = fault

    def clear(self) -> None:
        """All is well again: the next fault is logged, whichever it is."""
        self.fault = ""
