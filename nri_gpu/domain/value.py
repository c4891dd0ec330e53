"""Values: equality skips the fields in `aside`; values are recorded as JSON that is read back.

    Struct      object without the fields that have their default      set, frozenset   sorted list
    tuple       list                                                    mapping          object, or a list of pairs
    enum        its value

What is recorded is canonical: equal values give equal text, so texts can be compared, and digests of them. msgspec
leaves out only defaults that are the very same object, so the writing is done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, ClassVar, TypeVar, overload

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

T = TypeVar("T")


class Recorded(Struct, frozen=True, forbid_unknown_fields=True):
    """A value in audit logs and snapshots, which are not read by a version that does not know all their fields."""


class Value(Recorded, frozen=True):
    """A value that equals another of its class if they differ only in the fields of `aside`."""

    aside: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        """Compare every field that is not aside."""
        if type(other) is not type(self):
            return NotImplemented
        parts = _parts(type(self))
        return bool(parts(self) == parts(other))

    def __hash__(self) -> int:
        return hash(_parts(type(self))(self))


@cache
def _parts(cls: type[Value]) -> Callable[[object], object]:
    return attrgetter(*(name for name in cls.__struct_fields__ if name not in cls.aside))


def canonical(value: object) -> str:
    """Return the value as one line of JSON."""
    return json.dumps(encode(value), separators=(",", ":"))


@overload
def encode(value: Struct) -> dict[str, object]: ...
@overload
def encode(value: object) -> object: ...
def encode(value: object) -> object:
    """Return the value as JSON values. Raises: TypeError: it has a part that cannot be read back."""
    kind: type = type(value)
    return _encoder(kind)(value)


@cache
def _encoder(kind: type) -> Callable[[Any], object]:
    """Return what encodes values of a class: it is the same for all of them, and each decision has a hundred."""
    if issubclass(kind, Enum):
        return attrgetter("value")
    if issubclass(kind, str | int | float | NoneType):
        return lambda value: value
    if issubclass(kind, Struct):
        defaults = _defaults(kind)
        return lambda value: {
            name: encode(part) for name, default in defaults if (part := getattr(value, name)) != default
        }
    if issubclass(kind, Mapping):
        return _encode_mapping
    if issubclass(kind, AbstractSet):
        return lambda value: sorted(map(encode, value), key=json.dumps)
    if issubclass(kind, tuple | list):
        return lambda value: list(map(encode, value))
    raise TypeError(f"{kind.__name__} cannot be recorded")


def _encode_mapping(value: Mapping[object, object]) -> object:
    pairs = [(encode(key), encode(each)) for key, each in value.items()]
    if all(isinstance(key, str) for key, _ in pairs):
        return dict(sorted(pairs))
    return sorted(pairs, key=lambda pair: json.dumps(pair[0]))


@cache
def _defaults(kind: type[Struct]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (each.name, each.default if each.default_factory is NODEFAULT else each.default_factory())
        for each in fields(kind)
    )


def decode(wanted: type[T], found: object) -> T:
    """Return the value that `encode` made this of. Raises: ValueError."""
    match found:  # the one mapping that is a list of pairs
        case {"driver": {"trees": [*pairs], **files}, **rest}:
            try:
                found = {**rest, "driver": {**files, "trees": {tuple(key): tree for key, tree in pairs}}}
            except (TypeError, ValueError) as error:
                raise ValueError(f"driver.trees is no list of pairs: {error}") from None
    return msgspec.convert(found, wanted)
