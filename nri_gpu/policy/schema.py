"""The table of settings, read off the declarations in `model.py`: one row per key of the policy file.

Modules with declarations do not postpone their annotations: they are read at every start, and texts would have to be
evaluated for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_type_hints

from msgspec import Struct

from nri_gpu.policy.compound_kinds import TableOf, Tables, fields_of
from nri_gpu.policy.kinds import Declaration, SettingKind
from nri_gpu.policy.model import Policy
from nri_gpu.policy.pools import POOLS_MAX, Pool
from nri_gpu.policy.rules import RULES_MAX, Rule

SCHEMA_VERSION: Final = 1  # `schema` at the top of the file
SCHEMA_HELP: Final = "Version of this file's format."


class Setting(Struct, frozen=True):
    """One row. path: `plugin.socket`. flag: its command line option, or empty."""

    section: str
    key: str
    kind: SettingKind
    default: object
    help: str
    flag: str

    @property
    def path(self) -> str:
        """Dotted key path."""
        return f"{self.section}.{self.key}"

    @property
    def raw_default(self) -> object:
        """The default as TOML has it."""
        return self.kind.raw(self.default)


def _sections() -> Mapping[str, Any]:
    default, others = Policy.default(), (*LISTS, "source", "fault")
    return {name: getattr(default, name) for name in Policy.__struct_fields__ if name not in others}


def _rows(section: str, default: Any) -> Iterator[Setting]:  # noqa: ANN401 - any of the model's sections
    hints = get_type_hints(type(default), include_extras=True)
    for name in default.__struct_fields__:
        (declared,) = hints[name].__metadata__
        assert isinstance(declared, Declaration)
        yield Setting(section, name, declared.kind, getattr(default, name), declared.help, declared.flag)


# Arrays of tables, `[[rule]]`.
LISTS: Final = {"rule": Tables(TableOf(Rule), RULES_MAX), "pool": Tables(TableOf(Pool), POOLS_MAX)}
SECTIONS: Final = _sections()  # name -> the section with every default
SETTINGS: Final = tuple(row for section, default in SECTIONS.items() for row in _rows(section, default))
BY_PATH: Final = {setting.path: setting for setting in SETTINGS}


def section_help(section: str) -> str:
    """What a section is about: its class says it."""
    about = LISTS[section].record.cls if section in LISTS else SECTIONS[section]
    return (about.__doc__ or "").strip()


def reference() -> str:
    """One heading and one table per section, then one per array of tables."""
    lines = [line for section in SECTIONS for line in _section(section)]
    return "\n".join([*lines, *(line for name in LISTS for line in _list(name))])


def _section(section: str) -> Iterator[str]:
    yield f"### `[{section}]`\n"
    yield f"{section_help(section)}\n"
    yield "| key | default | option | what it is |"
    yield "|---|---|---|---|"
    for row in SETTINGS:
        if row.section == section:
            option = f"`{row.flag}`" if row.flag else ""
            # TOML and JSON write strings, numbers and arrays of them alike.
            yield f"| `{row.key}` | `{json.dumps(row.raw_default)}` | {option} | {row.help} |"
    yield ""


def _list(name: str) -> Iterator[str]:
    yield f"### `[[{name}]]`\n"
    yield f"{section_help(name)}\n"
    yield "| key | what it is |"
    yield "|---|---|"
    for key, field in fields_of(LISTS[name].record.cls).items():
        must = " Must be there." if field.required else ""
        yield f"| `{key}` | {field.declared.help}{must} |"
    yield ""


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> dict[str, object]:
    """Accepts what `parse_policy` accepts, short of what JSON Schema has no words for.

    60.0 is an integer there; and what two keys mean together, or two tables (`cross.py`), only the parser knows.
    """
    sections = {section: _section_schema(section) for section in SECTIONS}
    lists = {name: {**kind.schema(), "description": section_help(name)} for name, kind in LISTS.items()}
    version = {"type": "integer", "const": SCHEMA_VERSION, "description": SCHEMA_HELP}
    return {
        "$schema": DIALECT,
        "title": "nri-gpu policy",
        "type": "object",
        "additionalProperties": False,
        "properties": {"schema": version, **sections, **lists},
    }


def schema_text() -> str:
    """As it stands in config/policy.schema.json."""
    return json.dumps(policy_schema(), indent=2) + "\n"


def _section_schema(section: str) -> dict[str, object]:
    keys = {
        setting.key: {**setting.kind.schema(), "default": setting.raw_default, "description": setting.help}
        for setting in SETTINGS
        if setting.section == section
    }
    return {
        "type": "object",
        "description": section_help(section),
        "additionalProperties": False,
        "properties": keys,
    }
