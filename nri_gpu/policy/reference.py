"""The table of settings as Markdown, for docs/policy.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nri_gpu.policy.fields import SECTIONS, SETTINGS, section_help


def reference() -> str:
    """One heading and one table per section."""
    return "\n".join(line for section in SECTIONS for line in _section(section))


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
