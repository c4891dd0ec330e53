"""Files that are read off the policy's own declarations: `config/policy.schema.json`, `docs/reference/policy.md`."""

import json
from collections.abc import Iterator

import msgspec

from nri_gpu.policy.document import LISTS, SECTIONS, file_type, section_help
from nri_gpu.policy.forms import settings_of
from tools.files import ROOT, Files
from tools.reference import linked

SCHEMA = ROOT / "config" / "policy.schema.json"
MANUAL = ROOT / "docs" / "reference" / "policy.md"
FIRST = "## `[plugin]`"  # what is made of declarations begins here


def schema_text() -> str:
    """Return the JSON Schema, config/policy.schema.json. It accepts what `parse_policy` accepts, as far as it can tell.

    60.0 is an integer there; and what two keys mean together, or two tables, only the parser knows.
    """
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "nri-gpu policy"}
    return json.dumps({**dialect, **msgspec.json.schema(file_type())}, indent=2) + "\n"


def reference() -> str:
    """Return one heading and one table per section, then one per array of tables."""
    lines = [line for section in SECTIONS for line in _section(section)]
    return linked("\n".join([*lines, *(line for name in LISTS for line in _list(name))]))


def _section(section: str) -> Iterator[str]:
    yield f"## `[{section}]`\n"
    yield f"{section_help(section)}\n"
    yield "| key, option | default | what it is |"
    yield "|---|---|---|"
    for row in settings_of(SECTIONS[section]).values():
        option = f", `{row.flag}`" if row.flag else ""
        # TOML and JSON write strings, numbers and arrays of them alike.
        yield f"| `{row.key}`{option} | `{json.dumps(row.written_default)}` | {row.help} |"
    yield ""


def _list(name: str) -> Iterator[str]:
    yield f"## `[[{name}]]`\n"
    yield f"{section_help(name)}\n"
    yield "| key | what it is |"
    yield "|---|---|"
    for field in settings_of(LISTS[name]).values():
        must = " Must be there." if field.default is msgspec.NODEFAULT else ""
        yield f"| `{field.key}` | {field.help}{must} |"
    yield ""


def schema_and_page() -> Files:
    """Return the JSON Schema and the page."""
    page = MANUAL.read_text(encoding="utf-8").partition(FIRST)[0] + reference().strip() + "\n"
    return {SCHEMA: schema_text(), MANUAL: page}
