"""The policy file as a whole: its sections and arrays of tables, one row for each setting, and what is made of them.

What is made: the type that the parser reads it by, its JSON Schema, and the reference in docs/policy.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, defstruct

from nri_gpu.policy.forms import Field, fields_of, table_of
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import POOLS_MAX, RULES_MAX, Pool, Rule

SCHEMA_VERSION: Final = 1  # `schema` at the top of the file
LISTS: Final[Mapping[str, type[Rule | Pool]]] = {"rule": Rule, "pool": Pool}  # arrays of tables, `[[rule]]`
_LISTS_MAX: Final = {"rule": RULES_MAX, "pool": POOLS_MAX}
SECTIONS: Final[Mapping[str, type[Struct]]] = {
    name: type(value)
    for name in Policy.__struct_fields__
    if name not in LISTS and isinstance(value := getattr(Policy.default(), name), Struct)
}


# Dotted key path, `plugin.socket` -> the setting.
SETTINGS: Final[Mapping[str, Field]] = {
    f"{section}.{key}": field for section, cls in SECTIONS.items() for key, field in fields_of(cls).items()
}


def _file() -> type[Struct]:
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


def _array(name: str) -> Any:  # noqa: ANN401 - a type
    table: Any = table_of(LISTS[name], name)
    return Annotated[tuple[table, ...], Meta(max_length=_LISTS_MAX[name], description=section_help(name))]


def section_help(section: str) -> str:
    """What a section is about: its class says it."""
    return ((LISTS.get(section) or SECTIONS[section]).__doc__ or "").strip()


FILE: Final = _file()


def schema_text() -> str:
    """The JSON Schema, config/policy.schema.json. It accepts what `parse_policy` accepts, as far as it can tell.

    60.0 is an integer there; and what two keys mean together, or two tables, only the parser knows.
    """
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "nri-gpu policy"}
    return json.dumps({**dialect, **msgspec.json.schema(FILE)}, indent=2) + "\n"


def reference() -> str:
    """One heading and one table per section, then one per array of tables."""
    lines = [line for section in SECTIONS for line in _section(section)]
    return "\n".join([*lines, *(line for name in LISTS for line in _list(name))])


def _section(section: str) -> Iterator[str]:
    yield f"### `[{section}]`\n"
    yield f"{section_help(section)}\n"
    yield "| key | default | option | what it is |"
    yield "|---|---|---|---|"
    for row in fields_of(SECTIONS[section]).values():
        option = f"`{row.flag}`" if row.flag else ""
        # TOML and JSON write strings, numbers and arrays of them alike.
        yield f"| `{row.key}` | `{json.dumps(row.written_default)}` | {option} | {row.help} |"
    yield ""


def _list(name: str) -> Iterator[str]:
    yield f"### `[[{name}]]`\n"
    yield f"{section_help(name)}\n"
    yield "| key | what it is |"
    yield "|---|---|"
    for field in fields_of(LISTS[name]).values():
        must = " Must be there." if field.default is msgspec.NODEFAULT else ""
        yield f"| `{field.key}` | {field.help}{must} |"
    yield ""
