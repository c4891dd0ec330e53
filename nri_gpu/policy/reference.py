"""The table of settings as Markdown, for docs/policy.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nri_gpu.policy.fields import LISTS, SECTIONS, SETTINGS, section_help
from nri_gpu.policy.records import fields_of


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
