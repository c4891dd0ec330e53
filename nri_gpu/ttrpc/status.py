"""How a call ended: a gRPC code and a sentence."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Self

from msgspec import Struct


class StatusCode(IntEnum):
    """gRPC's codes; ttrpc borrows them whole."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(Struct, frozen=True):
    """A code with its sentence; the sentence travels to whoever made the call."""

    code: StatusCode
    message: str = ""

    @classmethod
    def from_wire(cls, number: int, message: str) -> Self:
        """A peer's status. A number that gRPC does not know is UNKNOWN: it is an error all the same."""
        try:
            return cls(StatusCode(number), message)
        except ValueError:
            return cls(StatusCode.UNKNOWN, f"{message} (code {number})")

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.code is StatusCode.OK

    def __str__(self) -> str:
        """`FAILED_PRECONDITION: the sentence`."""
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


OK: Final = Status(StatusCode.OK)
