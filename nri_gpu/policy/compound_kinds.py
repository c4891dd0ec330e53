"""Kinds of settings with a short way to write them: one or a list, a number or a word, a size with its unit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Final, get_type_hints

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from nri_gpu.domain.text import quoted
from nri_gpu.policy.globs import Globs
from nri_gpu.policy.kinds import Choice, Choices, Declaration, Patterns, SettingKind, Text, Wrong
from nri_gpu.policy.text import known_words, shown_key, toml_type

UNLIMITED: Final = 2**31  # stands for the word; more than any machine has of anything we count
_UNLIMITED_WORD: Final = "unlimited"
LABELS_MAX: Final = 16  # in one rule


class PatternOrMore(SettingKind, frozen=True):
    """One shell-style pattern, or a list of at least one."""

    item: Text

    def faults(self, raw: object) -> Wrong:
        """Neither, empty, or a pattern wrong."""
        if raw == []:
            yield "", "must not be empty: leave the key out to match everything"
        elif isinstance(raw, list):
            yield from Patterns(self.item).faults(raw)
        else:
            yield from self.item.faults(raw)

    def convert(self, raw: str | list[str]) -> Globs:
        """Compiled."""
        return Globs((raw,) if isinstance(raw, str) else tuple(raw))

    def raw(self, value: Globs) -> object:
        """As a list."""
        return list(value.patterns)

    def schema(self) -> dict[str, object]:
        """Either."""
        return {"anyOf": [self.item.schema(), {**Patterns(self.item).schema(), "minItems": 1}]}


class WordOrMore(SettingKind, frozen=True):
    """One word of a closed set, or a list of at least one."""

    words: type[StrEnum]

    def faults(self, raw: object) -> Wrong:
        """Neither."""
        yield from (Choices(self.words) if isinstance(raw, list) else Choice(self.words)).faults(raw)

    def convert(self, raw: str | list[str]) -> frozenset[StrEnum]:
        """The set."""
        return Choices(self.words).convert([raw] if isinstance(raw, str) else raw)

    def raw(self, value: frozenset[StrEnum]) -> object:
        """As a list."""
        return Choices(self.words).raw(value)

    def schema(self) -> dict[str, object]:
        """Either."""
        return {"anyOf": [Choice(self.words).schema(), Choices(self.words).schema()]}


class LabelPatterns(SettingKind, frozen=True):
    """A table of label keys, each with a pattern for its value."""

    key: Text
    value: Text

    def faults(self, raw: object) -> Wrong:
        """Not a table, empty, too many, or a key or pattern wrong."""
        if not isinstance(raw, Mapping):
            yield "", f"must be a table of label = pattern, not {toml_type(raw)}"
            return
        if not raw:
            yield "", "must not be empty: leave the key out to match everything"
        if len(raw) > LABELS_MAX:
            yield "", f"has {len(raw)} labels, over the limit of {LABELS_MAX}"
        for key, value in raw.items():
            yield from ((f".{shown_key(key)}", f"the label {message}") for _, message in self.key.faults(key))
            yield from ((f".{shown_key(key)}", message) for _, message in self.value.faults(value))

    def convert(self, raw: Mapping[str, str]) -> tuple[tuple[str, Globs], ...]:
        """Compiled, in the order of the file."""
        return tuple((key, Globs((value,))) for key, value in raw.items())

    def raw(self, value: tuple[tuple[str, Globs], ...]) -> object:
        """As a table."""
        return {key: globs.patterns[0] for key, globs in value}

    def schema(self) -> dict[str, object]:
        """An object of strings."""
        names = {"pattern": f"^(?:{self.key.pattern})$", "maxLength": self.key.max_length}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": self.value.schema(),
            "minProperties": 1,
            "maxProperties": LABELS_MAX,
        }


class Limit(SettingKind, frozen=True):
    """A whole number from a minimum up, or the word `unlimited`."""

    minimum: int = 0
    maximum: int = 100_000

    def faults(self, raw: object) -> Wrong:
        """Neither."""
        if raw == _UNLIMITED_WORD:
            return
        if isinstance(raw, str):
            yield "", f'must be a whole number or "{_UNLIMITED_WORD}", not {quoted(raw)}'
        elif isinstance(raw, bool) or not isinstance(raw, int):
            yield "", f'must be a whole number or "{_UNLIMITED_WORD}", not {toml_type(raw)}'
        elif not self.minimum <= raw <= self.maximum:
            shown = raw if abs(raw) < 10**12 else "a huge number"
            yield "", f'must be {self.minimum} to {self.maximum} or "{_UNLIMITED_WORD}", not {shown}'

    def convert(self, raw: int | str) -> int:
        """UNLIMITED stands for the word."""
        return UNLIMITED if isinstance(raw, str) else raw

    def raw(self, value: int) -> object:
        """As the file has it."""
        return _UNLIMITED_WORD if value == UNLIMITED else value

    def schema(self) -> dict[str, object]:
        """Either."""
        number = {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}
        return {"anyOf": [number, {"const": _UNLIMITED_WORD}]}


_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SIZE: Final = Text(r"[1-9][0-9]{0,14}(?:[KMGT]i?)?", 'a size such as "40Gi"', 17)


class Size(SettingKind, frozen=True):
    """Bytes, written as requests write them: `40Gi`, `80G`."""

    def faults(self, raw: object) -> Wrong:
        """Not a size."""
        yield from SIZE.faults(raw)

    def convert(self, raw: str) -> int:
        """Bytes."""
        number = raw.rstrip("KMGTi")
        return int(number) * (_UNITS | _BINARY_UNITS)[raw[len(number) :]]

    def raw(self, value: int) -> object:
        """In bytes."""
        return str(value)

    def schema(self) -> dict[str, object]:
        """A string."""
        return SIZE.schema()


class TableField(Struct, frozen=True):
    """One key of a table. default: NODEFAULT where the key must be there, None where it may be left out."""

    declared: Declaration
    default: object

    @property
    def required(self) -> bool:
        """Whether a table without it is a fault."""
        return self.default is NODEFAULT


@cache
def fields_of(cls: type) -> Mapping[str, TableField]:
    """The keys of a declared class, in its order."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        each.name: TableField(hints[each.name].__metadata__[0], each.default)
        for each in fields(cls)
        if not each.name.startswith("_")
    }


class TableOf(SettingKind, frozen=True):
    """A table whose keys a class declares. Keys that are left out keep its defaults."""

    cls: type

    def faults(self, raw: object) -> Wrong:
        """Not a table, unknown or missing keys, and whatever is wrong in each."""
        known = fields_of(self.cls)
        if not isinstance(raw, Mapping):
            yield "", f"must be a table, not {toml_type(raw)}"
            return
        for key, value in raw.items():
            if key in known:
                yield from ((f".{key}{inner}", message) for inner, message in known[key].declared.kind.faults(value))
            else:
                yield f".{shown_key(key)}", f"unknown key{known_words(key, known)}"
        for key, field in known.items():
            if field.required and key not in raw:
                yield "", f"{key} is missing: {field.declared.help}"

    def convert(self, raw: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an instance of cls
        """An instance of the class."""
        return self.cls(**self.given(raw))

    def given(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Only the keys that are there, converted."""
        known = fields_of(self.cls)
        return {key: known[key].declared.kind.convert(value) for key, value in raw.items()}

    def raw(self, value: object) -> object:
        """Without the keys that were left out."""
        items = ((key, field, getattr(value, key)) for key, field in fields_of(self.cls).items())
        return {key: field.declared.kind.raw(item) for key, field, item in items if item != field.default}

    def schema(self) -> dict[str, object]:
        """An object that takes no other key."""
        known = fields_of(self.cls)
        properties = {
            key: {**field.declared.kind.schema(), "description": field.declared.help} for key, field in known.items()
        }
        required = [key for key, field in known.items() if field.required]
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
            **({"required": required} if required else {}),
        }


class Partial(TableOf, frozen=True):
    """A table that changes some keys of another: kept as pairs of key and value."""

    def convert(self, raw: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """In the order of the file."""
        return tuple(self.given(raw).items())

    def raw(self, value: Any) -> object:  # noqa: ANN401 - pairs, see convert
        """As written."""
        known = fields_of(self.cls)
        return {key: known[key].declared.kind.raw(item) for key, item in value}


class Tables(SettingKind, frozen=True):
    """`[[name]]`, any number of times up to a limit: tables of one class, in order."""

    record: TableOf
    maximum: int

    def faults(self, raw: object) -> Wrong:
        """Not an array of tables, too many, and what is wrong in each."""
        if not isinstance(raw, list):
            yield "", f"must be an array of tables, in double brackets, not {toml_type(raw)}"
            return
        if len(raw) > self.maximum:
            yield "", f"has {len(raw)} tables, over the limit of {self.maximum}"
        for index, each in enumerate(raw):
            yield from ((f"[{index}]{inner}", message) for inner, message in self.record.faults(each))

    def convert(self, raw: list[Mapping[str, Any]]) -> tuple[Any, ...]:
        """Each of them."""
        return tuple(self.record.convert(each) for each in raw)

    def raw(self, value: tuple[object, ...]) -> object:
        """Each of them."""
        return [self.record.raw(each) for each in value]

    def schema(self) -> dict[str, object]:
        """An array of objects."""
        return {"type": "array", "items": self.record.schema(), "maxItems": self.maximum}
