"""The policy file's JSON Schema, for editors; made of the same declarations that the parser checks by."""

from __future__ import annotations

import json
from typing import Final

from nri_gpu.policy.fields import LISTS, SCHEMA_HELP, SCHEMA_VERSION, SECTIONS, SETTINGS, section_help

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
