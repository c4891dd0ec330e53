"""Kinds of settings that are tables: one with declared keys, some keys of one, and a list of such."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from nri_gpu.policy.kinds import Declaration, Wrong
from nri_gpu.policy.text import known_words, shown_key, toml_type


class Field(Struct, frozen=True):
    """One key of a table. default: NODEFAULT where the key must be there, None where it may be left out."""

    declared: Declaration
    default: object

    @property
    def required(self) -> bool:
        """Whether a table without it is a fault."""
        return self.default is NODEFAULT


@cache
def fields_of(cls: type) -> Mapping[str, Field]:
    """The keys of a declared class, in its order."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        each.name: Field(hints[each.name].__metadata__[0], each.default)
        for each in fields(cls)
        if not each.name.startswith("_")
    }


class Record(Struct, frozen=True):
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


class Partial(Record, frozen=True):
    """A table that changes some keys of another: kept as pairs of key and value."""

    def convert(self, raw: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """In the order of the file."""
        return tuple(self.given(raw).items())

    def raw(self, value: tuple[tuple[str, Any], ...]) -> object:  # type: ignore[override]  # pairs, see convert
        """As written."""
        known = fields_of(self.cls)
        return {key: known[key].declared.kind.raw(item) for key, item in value}


class Tables(Struct, frozen=True):
    """`[[name]]`, any number of times up to a limit: tables of one class, in order."""

    record: Record
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
