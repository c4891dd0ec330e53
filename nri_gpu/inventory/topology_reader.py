"""The strict reading of a TOML file's tables into Structs: every fault is noted with its key path."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Final, TypeVar, cast

from msgspec import Meta, Struct, ValidationError, convert, inspect
from msgspec.structs import FieldInfo, fields

from nri_gpu.domain.errors import Fault

SHOWN_MAX: Final = 96  # characters of a wrong value that a message repeats


class Table(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A table of the file. Its fields declare its keys, with the type and the bounds of each."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield key and sentence for values that are each right and do not go together."""
        return iter(())


T = TypeVar("T", bound=Table)


def unique(among: str) -> Meta:
    """Return the mark of a field whose value only one table may have. among: the tables that share these values."""
    return Meta(extra={"among": among})


def parsed(parse: Callable[[str], object]) -> Meta:
    """Return the mark of a field whose texts stand for another value, to be checked next. parse raises ValueError."""
    return Meta(extra={"parse": parse})


class TableReader:
    """The reader of one file's tables. faults: those found so far."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._firsts: dict[Hashable, str] = {}
        self.faults: list[Fault] = []

    def fault(self, path: str, message: str) -> None:
        """Note one fault at a key path."""
        self.faults.append(Fault(self._file, path, message))

    def read(self, kind: type[T], data: object, path: str = "") -> T | None:
        """Return the table at `path`, or None if it has a fault, which is noted."""
        if not isinstance(data, dict):
            self.fault(path, "must be a table")
            return None
        before, prefix = len(self.faults), f"{path}." if path else ""
        declared, values = _declared(kind), dict[str, object]()
        for key, (field, meaning) in declared.items():
            if key in data:
                values[field.name] = self._value(field, meaning, data[key], prefix + key)
            elif field.required:
                self.fault(prefix + key, f"missing; {_description(meaning)}")
        for key in sorted(data.keys() - declared.keys()):
            self.fault(prefix + key, f"unknown key (known here: {', '.join(sorted(declared))})")
        if len(self.faults) > before:
            return None
        table = kind(**values)
        for key, message in table.conflicts():
            self.fault(prefix + key if key else path, message)
        return table

    def _value(self, field: FieldInfo, meaning: inspect.Type, raw: object, path: str) -> object:
        """Return the value of a field, or None if it is wrong, which is noted."""
        extra: dict[str, object] = {}
        choices = meaning.types if isinstance(meaning, inspect.UnionType) else (meaning,)
        for choice in choices:
            if isinstance(choice, inspect.StructType):
                return self.read(cast("type[Table]", choice.cls), raw, path)
            if isinstance(raw, list) and (item := _table_of(choice)):
                return tuple(self.read(item, each, f"{path}[{at}]") for at, each in enumerate(raw))
            if isinstance(choice, inspect.Metadata):
                extra |= choice.extra or {}
        try:
            parse = extra.get("parse")
            meant = parse(raw) if callable(parse) and isinstance(raw, str) else raw
            value: Hashable = convert(meant, field.type)
        except ValidationError:
            self.fault(path, f"{_shown(raw)} is not {_description(meaning)}")
            return None
        except ValueError as error:
            self.fault(path, str(error))
            return None
        if "among" in extra:
            first = self._firsts.setdefault((extra["among"], field.encode_name, value), path)
            if first != path:
                self.fault(path, f"the same as {first}")
        return value


@cache
def _declared(kind: type[Table]) -> Mapping[str, tuple[FieldInfo, inspect.Type]]:
    """Return each field by its key, with what its type means."""
    return {field.encode_name: (field, inspect.type_info(field.type)) for field in fields(kind)}


def _table_of(array: inspect.Type) -> type[Table] | None:
    """Return the kind of table that an array holds, or None if it holds other values."""
    item = array.item_type if isinstance(array, inspect.VarTupleType) else None
    return cast("type[Table]", item.cls) if isinstance(item, inspect.StructType) else None


def _description(meaning: inspect.Type) -> str:
    match meaning:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            return str((schema or {}).get("description") or _description(inner))
        case inspect.UnionType(types=types):
            return ", or ".join(_description(each) for each in types if not isinstance(each, inspect.NoneType))
        case inspect.VarTupleType():
            return "an array of tables"
        case inspect.StructType():
            return "a table"
        case inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=low, le=high):
            return f"a number from {low} to {high}"
        case inspect.BoolType():
            return "true or false"
        case inspect.EnumType(cls=words):
            return f"one of {', '.join(cast('list[str]', list(words)))}"
        case inspect.LiteralType(values=values):
            return " or ".join(map(str, values))
    return "text"


def _shown(raw: object) -> str:
    return repr(raw[:SHOWN_MAX]) if isinstance(raw, str) else repr(raw)[:SHOWN_MAX]
