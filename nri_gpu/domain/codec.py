"""Values to JSON and back, read off their own declarations: frozen Structs of plain parts, nested as they come.

    Struct      object without the fields that have their default      set, frozenset   sorted list
    tuple       list                                                    mapping          object, or a list of pairs
    enum        its value                                               float inf        "inf"

What is written is canonical: equal values give equal text, so texts can be compared, and digests of them.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeVar

from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

T = TypeVar("T")
INFINITE: Final = {"inf": math.inf, "-inf": -math.inf}
_PLAIN: Final = (str, int, float, bool, types.NoneType)


class CodecError(ValueError):
    """JSON that is not a value of the type wanted. Says where in it, and what is wrong."""


def canonical(value: object) -> str:
    """The value as one line of JSON."""
    return json.dumps(encode(value), separators=(",", ":"))


def encode(value: Any) -> Any:  # noqa: ANN401 - any value in, JSON values out
    """The value as JSON values. Raises: TypeError: it has a part that no declaration tells how to read back."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Struct):
        return _fields_of(value)
    if isinstance(value, Mapping):
        return _pairs_of(value)
    if isinstance(value, AbstractSet):
        return sorted((encode(each) for each in value), key=_order)
    if isinstance(value, tuple | list):
        return [encode(each) for each in value]
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def decode(wanted: type[T], found: object, where: str = "") -> T:
    """The value that `encode` made this of. where: what to call it in an error. Raises: CodecError."""
    kind: Any = wanted
    value: T = _reader(kind)(found, where or wanted.__name__)
    return value


def _fields_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a Struct
    found = {}
    kind: Any = type(value)
    for name, default in _defaults(kind):
        part = getattr(value, name)
        if default is NODEFAULT or part != default:
            found[name] = encode(part)
    return found


@lru_cache(maxsize=64)
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((each.name, _default(each)) for each in fields(kind))


def _default(each: FieldInfo) -> Any:  # noqa: ANN401 - of any field
    made: Any = each.default_factory
    return each.default if made is NODEFAULT else made()


def _pairs_of(value: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - JSON values
    pairs = [[encode(key), encode(each)] for key, each in value.items()]
    if all(isinstance(key, str) for key, _ in pairs):
        return dict(sorted(pairs))
    return sorted(pairs, key=lambda pair: _order(pair[0]))


def _order(encoded: object) -> str:
    return json.dumps(encoded, sort_keys=True)


Reader = Callable[[Any, str], Any]


@lru_cache(maxsize=128)
def _reader(wanted: Any) -> Reader:  # noqa: ANN401 - any annotation
    """What reads a value of this annotation."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if isinstance(wanted, typing.NewType):
        return _reader(wanted.__supertype__)
    if origin is typing.Annotated:
        return _reader(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if isinstance(origin, type) and issubclass(origin, AbstractSet):
        member = _reader(arguments[0])
        return lambda found, where: frozenset(_each(member, found, where))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(_reader, arguments))
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return _enum(wanted)
    if isinstance(wanted, type) and issubclass(wanted, Struct):
        return _struct(wanted)
    if wanted in _PLAIN:
        return _plain(wanted)
    raise TypeError(f"{wanted} cannot be read back")


def _plain(wanted: type) -> Reader:
    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        if wanted is float and not isinstance(found, bool) and isinstance(found, int | float | str):
            if isinstance(found, str):
                return INFINITE[found] if found in INFINITE else _wrong(found, where, wanted.__name__)
            return float(found)
        return found if type(found) is wanted else _wrong(found, where, wanted.__name__)

    return read


def _enum(wanted: type[Enum]) -> Reader:
    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        try:
            return wanted(found)
        except ValueError:
            return _wrong(found, where, wanted.__name__)

    return read


def _union(members: tuple[Any, ...]) -> Reader:
    readers = [_reader(member) for member in members]

    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        for reader in readers[:-1]:
            try:
                return reader(found, where)
            except CodecError:
                continue
        return readers[-1](found, where)

    return read


def _tuple(members: tuple[Any, ...]) -> Reader:
    if len(members) == 2 and members[1] is ...:
        member = _reader(members[0])
        return lambda found, where: tuple(_each(member, found, where))
    readers = [_reader(member) for member in members]

    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        if not isinstance(found, list) or len(found) != len(readers):
            _wrong(found, where, f"a list of {len(readers)}")
        pairs = enumerate(zip(readers, found, strict=True))
        return tuple(reader(each, f"{where}[{at}]") for at, (reader, each) in pairs)

    return read


def _mapping(key: Reader, value: Reader) -> Reader:
    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        if isinstance(found, dict):
            found = [[name, each] for name, each in found.items()]
        if not isinstance(found, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in found):
            _wrong(found, where, "an object or a list of pairs")
        return types.MappingProxyType({key(name, where): value(each, f"{where}[{name!r}]") for name, each in found})

    return read


def _struct(wanted: type) -> Reader:
    readers = {name: _reader(hint) for name, hint in _hints(wanted).items()}

    def read(found: Any, where: str) -> Any:  # noqa: ANN401
        if not isinstance(found, dict):
            _wrong(found, where, "an object")
        if unknown := sorted(found.keys() - readers.keys()):
            raise CodecError(f"{where} has a field {unknown[0]!r} that this version does not know")
        given = {name: readers[name](each, f"{where}.{name}") for name, each in found.items()}
        try:
            return wanted(**given)
        except TypeError as error:
            raise CodecError(f"{where} is not whole: {error}") from None

    return read


def _hints(wanted: type) -> dict[str, Any]:
    hints = typing.get_type_hints(wanted, include_extras=True)
    return {each.name: hints[each.name] for each in fields(wanted)}


def _each(member: Reader, found: Any, where: str) -> list[Any]:  # noqa: ANN401 - JSON values
    if not isinstance(found, list):
        _wrong(found, where, "a list")
    return [member(each, f"{where}[{at}]") for at, each in enumerate(found)]


def _wrong(found: object, where: str, wanted: str) -> Any:  # noqa: ANN401 - never returns
    raise CodecError(f"{where} is {json.dumps(found)[:60]}, where {wanted} belongs")
