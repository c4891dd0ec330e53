"""The chart's README: each value with its default and its comment, old names, and answers to values of others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from tools.files import ROOT, Files

CHART: Final = ROOT / "deploy" / "helm" / "nri-gpu"
OLD: Final = "Old name of "  # how the schema describes one
LONGEST: Final = 60  # characters of a default
KEY: Final = re.compile(r"( *)([A-Za-z]+):")
HEAD: Final = """\
<!-- Made by tools/chart_values.py from values.yaml: run `make generate`. -->

# Values of the nri-gpu chart

`values.schema.json` checks them: Helm refuses a key that is not here. docs/kubernetes-install.md says how to install
the chart. `podSecurityContext` and `securityContext` are not offered on purpose: each pod has the rights that it needs,
and less breaks it.

| value | default | what it is |
|---|---|---|
"""


def schema() -> Any:  # noqa: ANN401 - parsed JSON
    """Return the JSON Schema of the values."""
    return json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def defaults() -> dict[str, Any]:
    """Return what values.yaml has."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return found


def foreign() -> dict[str, dict[str, str]]:
    """Return by chart of others what is ours instead of each value."""
    found: dict[str, dict[str, str]] = yaml.safe_load((CHART / "foreign.yaml").read_text(encoding="utf-8"))
    return found


def leaves(table: Mapping[str, Any], described: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value, down to where the schema no longer names keys."""
    for key, value in table.items():
        below = resolved(described["properties"][key])
        if value and "properties" in below:
            yield from leaves(value, below, f"{before}{key}.")
        else:
            yield before + key, value


def resolved(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a part of the schema refers to, or itself."""
    name = described.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = schema()["definitions"][name] if name else described
    return found


def comments(text: str) -> dict[str, str]:
    """Return the comment above each key of a values file, by path in the file's order; "" where there is none."""
    found: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip(" #"))
        elif match := KEY.match(line):
            path[len(match[1]) // 2 :] = [match[2]]
            found[".".join(path)] = " ".join(above)
            above = []
        elif not line:
            above = []
    return found


def old_names(described: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each old name of a value, and what the schema says of it."""
    for key, below in described.get("properties", {}).items():
        if below.get("description", "").startswith(OLD):
            yield before + key, below["description"].removeprefix(OLD).rstrip(".")
        yield from old_names(below, f"{before}{key}.")


def _rows() -> Iterator[str]:
    """Yield a row for each value, and for each table of values that has a comment."""
    told = comments((CHART / "values.yaml").read_text(encoding="utf-8"))
    values = dict(leaves(defaults(), schema()))
    for path, comment in told.items():
        if path in values:
            below = [text for other, text in told.items() if text and f"{other}.".startswith(f"{path}.")]
            default = json.dumps(values[path])
            shown = f"`{default}`" if len(default) <= LONGEST else "see values.yaml"
            yield f"| `{path}` | {_cell(shown)} | {_cell(' '.join(below))} |"
        elif comment and any(each.startswith(f"{path}.") for each in values):
            yield f"| **`{path}`** | | {_cell(comment)} |"


def _cell(text: str) -> str:
    """Escape for a table what looks like a tag, emphasis or a link outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<>*_\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def readme() -> str:
    """Return the page."""
    lines = ["", "## Old names", "", "Read for a release; NOTES names each that is set.", ""]
    lines += ["| old | now |", "|---|---|"]
    lines += [f"| `{old}` | {_cell(now)} |" for old, now in old_names(schema())]
    lines += [
        "",
        "## Values of other charts",
        "",
        "Each is refused with its answer.",
        "",
        "| of | yours | ours |",
        "|---|---|---|",
    ]
    lines += [
        f"| {chart} | `{key}` | {_cell(ours)} |" for chart, keys in foreign().items() for key, ours in keys.items()
    ]
    return HEAD + "\n".join([*_rows(), *lines]) + "\n"


def pages() -> Files:
    """Return the README of the chart."""
    return {CHART / "README.md": readme()}
