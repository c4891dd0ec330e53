"""Values some parts of which say nothing about what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

from msgspec import Struct


class Value(Struct, frozen=True):
    """Equal to another of its class that differs only in what `aside` names."""

    aside: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        """By every field that is not aside."""
        if type(other) is not type(self):
            return NotImplemented
        parts = _parts(type(self))
        return bool(parts(self) == parts(other))

    def __hash__(self) -> int:
        """As they are compared."""
        return hash(_parts(type(self))(self))


@cache
def _parts(cls: type[Value]) -> Callable[[object], Any]:
    return attrgetter(*(name for name in cls.__struct_fields__ if name not in cls.aside))
