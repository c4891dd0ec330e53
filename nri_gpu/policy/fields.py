"""The table of settings, read off the declarations in `model.py`: one row per key of the policy file.

Modules with declarations do not postpone their annotations: they are read at every start, and texts would have to be
evaluated for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_type_hints

from msgspec import Struct

from nri_gpu.policy.kinds import Declaration, Kind
from nri_gpu.policy.model import Policy
from nri_gpu.policy.pools import POOLS_MAX, Pool
from nri_gpu.policy.records import Record, Tables
from nri_gpu.policy.rules import RULES_MAX, Rule

SCHEMA_VERSION: Final = 1  # `schema` at the top of the file
SCHEMA_HELP: Final = "Version of this file's format."


class Setting(Struct, frozen=True):
    """One row. path: `plugin.socket`. flag: its command line option, or empty."""

    section: str
    key: str
    kind: Kind[Any]
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
    default = Policy.default()
    return {name: getattr(default, name) for name in Policy.__struct_fields__ if name not in (*LISTS, "source")}


def _rows(section: str, default: Any) -> Iterator[Setting]:  # noqa: ANN401 - any of the model's sections
    hints = get_type_hints(type(default), include_extras=True)
    for name in default.__struct_fields__:
        (declared,) = hints[name].__metadata__
        assert isinstance(declared, Declaration)
        yield Setting(section, name, declared.kind, getattr(default, name), declared.help, declared.flag)


# Arrays of tables, `[[rule]]`.
LISTS: Final = {"rule": Tables(Record(Rule), RULES_MAX), "pool": Tables(Record(Pool), POOLS_MAX)}
SECTIONS: Final = _sections()  # name -> the section with every default
SETTINGS: Final = tuple(row for section, default in SECTIONS.items() for row in _rows(section, default))
BY_PATH: Final = {setting.path: setting for setting in SETTINGS}


def section_help(section: str) -> str:
    """What a section is about: its class says it."""
    about = LISTS[section].record.cls if section in LISTS else SECTIONS[section]
    return (about.__doc__ or "").strip()
