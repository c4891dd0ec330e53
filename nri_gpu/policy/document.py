"""The policy file in msgspec's types: sections, arrays of tables, every setting; and every fault of a raw file.

msgspec itself stops at the first fault; here they are all found at once, in plain words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cache
from typing import Annotated, Final, Literal

import msgspec.inspect as types
from msgspec import UNSET, Meta, Struct, defstruct

from nri_gpu.domain.text import QUOTE_MAX, did_you_mean, quoted
from nri_gpu.policy.forms import Setting, settings_of, table_of
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import POOLS_MAX, RULES_MAX, Pool, Rule

LISTS: Final[Mapping[str, type[Rule | Pool]]] = {"rule": Rule, "pool": Pool}  # arrays of tables, `[[rule]]`
_LISTS_MAX: Final = {"rule": RULES_MAX, "pool": POOLS_MAX}
SECTIONS: Final[Mapping[str, type[Struct]]] = {
    name: type(value)
    for name in Policy.__struct_fields__
    if name not in LISTS and isinstance(value := getattr(Policy.default(), name), Struct)
}


def setting(path: str) -> Setting:
    """Return the setting of a dotted key path, `plugin.socket`. Raises: KeyError: there is none."""
    section, _, key = path.partition(".")
    return settings_of(SECTIONS[section])[key]


def options_in(arguments: Mapping[str, object]) -> dict[str, str | bool]:
    """Return the settings that a command line gives: key path -> raw value. arguments: by their names in argparse."""
    found = {
        f"{section}.{each.key}": arguments.get(each.flag.removeprefix("--").replace("-", "_"))
        for section, cls in SECTIONS.items()
        for each in settings_of(cls).values()
        if each.flag
    }
    return {path: value for path, value in found.items() if isinstance(value, str | bool)}


@cache
def file_type() -> type[Struct]:
    """Return the whole file as one type. It is made when a file is read: a daemon without one starts sooner."""
    version = Meta(
        description="Version of this file's format.", extra={"rule": ", the only version that this nri-gpu reads"}
    )
    return defstruct(
        "Policy",
        [
            ("schema", Annotated[Literal[1], version], UNSET),
            *((name, table_of(cls, name, defaults=True), UNSET) for name, cls in SECTIONS.items()),
            *((name, _array(name), UNSET) for name in LISTS),
        ],
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _array(name: str) -> object:
    table = table_of(LISTS[name], name)
    return Annotated[tuple[table, ...], Meta(max_length=_LISTS_MAX[name], description=section_help(name))]  # type: ignore[valid-type]


def section_help(section: str) -> str:
    """Return the docstring of a section's class, which says what the section is about."""
    return ((LISTS.get(section) or SECTIONS[section]).__doc__ or "").strip()


_ARRAYS: Final = (types.VarTupleType, types.FrozenSetType)


def faults(kind: types.Type, raw: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield key path and sentence of each fault. kind: what msgspec tells of the type."""
    extra: dict[str, str] = {}
    while isinstance(kind, types.Metadata):
        extra |= kind.extra or {}
        kind = kind.type
    match kind:
        case types.StructType():
            yield from _of_table(kind, raw, path)
        case types.VarTupleType() | types.FrozenSetType():
            yield from _of_array(kind, raw, path, extra)
        case types.DictType():
            yield from _of_names(kind, raw, path, extra)
        case types.UnionType() if any(isinstance(_plain(each), _ARRAYS) for each in kind.types):
            like = next(each for each in kind.types if isinstance(_plain(each), _ARRAYS) is isinstance(raw, list))
            yield from faults(like, raw, path)
        case _:
            yield from ((path, message) for message in _of_scalar(kind, raw, extra))


def _plain(kind: types.Type) -> types.Type:
    while isinstance(kind, types.Metadata):
        kind = kind.type
    return kind


def _of_table(kind: types.StructType, raw: object, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(raw, Mapping):
        heading = "" if "[" in path else f", [{path}]"
        yield path, f"must be a table{heading}, not {toml_type(raw)}"
        return
    known = {field.name: field for field in kind.fields}
    for key, value in raw.items():
        below = f"{path}.{shown_key(key)}" if path else shown_key(key)
        if key in known:
            yield from faults(known[key].type, value, below)
        else:
            section = not path and isinstance(value, Mapping | list)
            words = known_words(key, (*SECTIONS, *LISTS) if section else known)
            yield below, f"unknown {'section' if section else 'key'}{_elsewhere(key, path) or words}"
    for key, field in known.items():
        if field.required and key not in raw:
            assert isinstance(field.type, types.Metadata)
            yield path, f"{key} is missing: {(field.type.extra_json_schema or {})['description']}"


def _elsewhere(key: str, path: str) -> str:
    """Return the heading under which a misplaced key belongs, as a clause, or empty."""
    home = next((section for section, cls in SECTIONS.items() if key in settings_of(cls)), "")
    return f"; it belongs under [{home}]" if home and "[" not in path else ""


def _of_array(
    kind: types.VarTupleType | types.FrozenSetType, raw: object, path: str, extra: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    tables = isinstance(_plain(kind.item_type), types.StructType)
    if not isinstance(raw, list):
        what = "an array of tables, in double brackets" if tables else "an array"
        yield path, f"must be {what}, not {toml_type(raw)}"
        return
    yield from _size(kind, raw, path, "tables" if tables else "items", extra)
    seen: set[object] = set()
    for index, each in enumerate(raw):
        wrong = list(faults(kind.item_type, each, f"{path}[{index}]"))
        if not (wrong or tables):
            if each in seen:
                wrong.append((f"{path}[{index}]", f"{quoted(each) if isinstance(each, str) else each} is listed twice"))
            seen.add(each)
        yield from wrong


def _of_names(kind: types.DictType, raw: object, path: str, extra: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    entry = extra.get("entry", "label = pattern")
    name = entry.partition(" ")[0]
    if not isinstance(raw, Mapping):
        yield path, f"must be a table of {entry}, not {toml_type(raw)}"
        return
    yield from _size(kind, raw, path, f"{name}s", extra)
    for key, value in raw.items():
        below = f"{path}.{shown_key(key)}"
        yield from ((where, f"the {name} {message}") for where, message in faults(kind.key_type, key, below))
        yield from faults(kind.value_type, value, below)


def _size(
    kind: types.VarTupleType | types.FrozenSetType | types.DictType,
    raw: Sized,
    path: str,
    what: str,
    extra: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    if kind.min_length and not raw:
        yield path, f"must not be empty{extra.get('empty', '')}"
    if kind.max_length is not None and len(raw) > kind.max_length:
        yield path, f"has {len(raw)} {what}, over the limit of {kind.max_length}"


def _of_scalar(kind: types.Type, raw: object, extra: Mapping[str, str]) -> Iterator[str]:
    match kind:
        case types.BoolType() if not isinstance(raw, bool):
            yield f"must be true or false, not {toml_type(raw)}"
        case types.IntType():
            yield from _of_number(kind, raw)
        case types.UnionType(types=(number, types.LiteralType(values=(str() as word,)))) if raw != word:
            number = _plain(number)
            assert isinstance(number, types.IntType)
            yield from _of_number(number, raw, f' or "{word}"')
        case types.StrType():
            yield from _of_text(kind, raw, extra)
        case types.EnumType():
            words = [each.value for each in kind.cls]
            if not isinstance(raw, str):
                yield f"must be a string, not {toml_type(raw)}"
            elif raw not in words:
                yield f"cannot be {quoted(raw)}{known_words(raw, words)}"
        case types.LiteralType(values=(only,)) if raw != only or isinstance(raw, bool):
            shown = raw if type(raw) is int and abs(raw) < 10**12 else toml_type(raw)
            yield f"must be {only}{extra.get('rule', '')}, not {shown}"


def _of_number(kind: types.IntType, raw: object, also: str = "") -> Iterator[str]:
    """Yield the fault of a number. also: what else it may be."""
    if isinstance(raw, bool) or not isinstance(raw, int):
        yield f"must be a whole number{also}, not {quoted(raw) if also and isinstance(raw, str) else toml_type(raw)}"
    elif not (kind.ge or 0) <= raw <= (kind.le or 0):
        yield f"must be {kind.ge} to {kind.le}{also}, not {raw if abs(raw) < 10**12 else 'a huge number'}"


def _of_text(kind: types.StrType, raw: object, extra: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(raw, str):
        yield f"must be a string, not {toml_type(raw)}"
    elif len(raw) > (kind.max_length or 0):
        yield f"has {len(raw)} characters, over the limit of {kind.max_length}"
    elif not re.fullmatch(extra["pattern"], raw):
        yield f"must be {extra['rule']}, not {quoted(raw)}"


def known_words(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "socket"?)` if a known word is close, else `, known: ...`."""
    words = list(known)
    return did_you_mean(word, words) or f", known: {', '.join(words)}"


def shown_key(key: str) -> str:
    """Return a plain key as it is, and any other key quoted as TOML would have it."""
    return key if key.isascii() and key.replace("-", "_").isidentifier() and len(key) <= QUOTE_MAX else quoted(key)


def toml_type(raw: object) -> str:
    """Return a value's type in the words of TOML's manual."""
    match raw:
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a float"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"
