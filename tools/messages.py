"""What docs/messages.md tells of the log and of alerts, and the check that the catalogue has all of it, and no more.

Each message and each alert has a heading, so that a link can lead to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from nri_gpu.domain.phrases import CATALOGUE
from tools.files import ROOT, Files

Catalogue = Mapping[str, Mapping[str, tuple[str, str]]]
PACKAGE: Final = ROOT / "nri_gpu"
TABLE: Final = PACKAGE / "domain" / "phrases.py"
MANUAL: Final = ROOT / "docs" / "messages.md"
ALERTS: Final = ROOT / "deploy" / "monitoring" / "alerts.yaml"
# First lines of tables.
CODES: Final = "| code | cause | fix |"
SENTENCES: Final = "| words of the sentence | cause | fix |"
REFUSED: Final = "| phrase | cause | fix |"
MADE: Final = (
    "## Warnings and errors\n\n<!-- Made of nri_gpu/domain/phrases.py: run `make generate`. -->\n"  # to the end
)
MADE_OF_ALERTS: Final = """
## Alerts

<!-- Made of deploy/monitoring/alerts.yaml: run `make generate`. -->

With the chart's `rules.runbookUrl` the annotation `runbook_url` of an alert leads to its heading here.
"""
# Alert -> the phrases that the log may have of it.
LOGGED: Final[Mapping[str, tuple[str, ...]]] = {
    "NriGpuDown": ("metrics are not served", "bug: a task ended by an exception, so nri-gpu ends"),
    "NriGpuNotConnected": (
        "runtime not reached, trying again",
        "runtime does not list its containers yet",
        "no connection survives Synchronize",
    ),
    "NriGpuReconnecting": ("connection ended, reconnecting", "another nri-gpu serves this runtime"),
    "NriGpuRequestsLate": ("request failed",),
    "NriGpuRequestsFailing": ("request failed", "bug in a handler"),
    "NriGpuContainersWithoutGpus": ("container runs without the GPUs it asked for",),
    "NriGpuStrayUse": ("stray GPU use",),
    "NriGpuGuardNotConnected": ("runtime not reached, trying again",),
    "NriGpuInventoryStale": ("inventory not refreshed",),
    "NriGpuInventoryFault": ("inventory not refreshed",),
    "NriGpuNodeNotReady": ("driver files not found", "driver lacks a library that containers need"),
    "NriGpuPolicyUnusable": ("policy not usable",),
    "NriGpuPolicyRejected": ("policy not reloaded, the old one stays",),
    "NriGpuOverlappingGrants": ("GPU granted to several pods, to one exclusively",),
    "NriGpuExternalConflict": ("container opens GPUs that another pod has exclusively",),
    "NriGpuLostContainers": ("container has ended for the runtime, but its processes still hold its GPUs",),
    "NriGpuGpuLost": ("GPU cannot be described", "node changed"),
    **{f"NriGpuGpu{each}": ("GPU health changed",) for each in ("Withheld", "NeedsReset", "Suspect", "Unstable")},
}

QUIET: Final = ("INFO", "DEBUG")
LASTING: Final = "warning, error if it lasts"  # said by LogOnce, which has a fault beside the phrase
CALLS: Final = {
    **{"warning": "warning", "note": "warning", "error": "error", "critical": "error", "log": "warning"},
    "guard": LASTING,
}
EITHER: Final = "warning or error"
Alert = Mapping[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Row(NamedTuple):
    """A row about refusals. name: a code, a phrase or words."""

    table: str
    name: str
    cause: str
    fix: str


def rows(text: str) -> Iterator[Row]:
    """Of the page's tables of refusals. Raises: ValueError: a row has too few cells, or too many."""
    table = ""
    for line in text.partition(MADE)[0].splitlines():
        if line in (CODES, SENTENCES, REFUSED):
            table = line
        elif line.startswith("| `"):
            cells = line.strip("| ").split(" | ")
            if len(cells) != 3:
                raise ValueError(f"messages.md: not a row of {table}: {line}")
            yield Row(table, cells[0].strip("`"), *cells[1:])


class Source(ast.NodeVisitor):
    """What one file logs. found: phrase -> level. strings: all of its texts. loose: where a phrase is not fixed."""

    def __init__(self, file: Path) -> None:
        self.found: dict[str, str] = {}
        self.loose: list[str] = []
        self._file = file
        self._tree = ast.parse(file.read_text(encoding="utf-8"))
        self._within: list[Function] = []
        nodes = list(ast.walk(self._tree))
        self.strings = [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        self._calls = [each for each in nodes if isinstance(each, ast.Call)]
        self._constants = {
            each.target.id: each.value
            for each in self._tree.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value
        }
        self.visit(self._tree)

    def visit_Raise(self, node: ast.Raise) -> None:
        """A parser's `raise clause.error(...)` logs nothing."""

    def visit_FunctionDef(self, node: Function) -> None:
        self._within.append(node)
        self.generic_visit(node)
        self._within.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in CALLS and node.args):
            return
        phrase, level = node.args[0], CALLS[node.func.attr]
        if node.func.attr == "log":
            if len(node.args) != 2 or all(_text(each) in QUIET for each in _choices(phrase)):
                return  # not loguru's, or not for an operator to act on
            phrase = node.args[1]
        elif node.func.attr == "note" and len(node.args) < 2:
            return  # not LogOnce's
        elif node.func.attr == "warning" and len(node.args) > 1:
            level = LASTING
        for each in self._values(phrase):
            if (text := _text(each)) is None:
                self.loose.append(f"{self._file}:{node.lineno}")
            else:
                self.found[text] = _level({level, self.found.get(text, level)})

    def _values(self, phrase: ast.expr) -> Iterable[ast.expr]:
        """What a phrase can be: itself, a constant of the module, or what callers within the module give."""
        if not isinstance(phrase, ast.Name):
            return _choices(phrase)
        if phrase.id in self._constants:
            return [self._constants[phrase.id]]
        function = self._within[-1]
        names = [each.arg for each in function.args.args if each.arg != "self"]
        if phrase.id not in names:
            return [phrase]
        given = self._given(function.name, names.index(phrase.id))
        return [each for each in given if not (isinstance(each, ast.Name) and each.id == phrase.id)]

    def _given(self, function: str, index: int) -> Iterator[ast.expr]:
        for call in self._calls:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == function and len(call.args) > index:
                yield from _choices(call.args[index])


def _level(levels: set[str]) -> str:
    if len(levels) == 1:
        return levels.pop()
    return LASTING if levels == {LASTING, "warning"} else EITHER


def _choices(node: ast.expr) -> tuple[ast.expr, ...]:
    return (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def sources() -> tuple[Source, ...]:
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if "_pb" not in file.parts and file != TABLE)
    return tuple(map(Source, files))


def faults(files: Iterable[Source], catalogue: Catalogue = CATALOGUE) -> Iterator[str]:
    """What is wrong between the source and the catalogue."""
    named = [phrase for phrases in catalogue.values() for phrase in phrases]
    said = "\n".join(text for file in files for text in file.strings)
    for file in files:
        yield from (f"{place}: the phrase is not fixed: put what varies in a field" for place in file.loose)
        yield from (f"phrases.py has no cause and fix of {each!r}" for each in file.found if each not in named)
    for phrase in named:
        if phrase not in said:
            yield f"nothing logs {phrase!r}, which phrases.py has"
        elif named.count(phrase) > 1:
            yield f"phrases.py has {phrase!r} twice"


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site make of a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def page(text: str, files: Iterable[Source], catalogue: Catalogue = CATALOGUE, alerts: Iterable[Alert] = ()) -> str:
    """The page, with catalogue and alerts below what people wrote; the levels are those of the source."""
    levels = {phrase: level for file in files for phrase, level in file.found.items()}
    sections = [
        f"\n### {section}\n"
        # Markdown quotes nothing within quotes.
        + "".join(
            f"\n#### `{phrase.replace('`', '')}`\n\n"
            f"- Level: {levels.get(phrase, 'warning')}\n- Cause: {cause}\n- Fix: {fix}\n"
            for phrase, (cause, fix) in phrases.items()
        )
        for section, phrases in catalogue.items()
    ]
    return text.partition(MADE)[0] + MADE + "".join(sections) + MADE_OF_ALERTS + "".join(map(_alert, alerts))


def _alert(rule: Alert) -> str:
    """Return what the page has of one alert. A value that Prometheus puts in stands there by its name."""
    texts = {key: re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"`\1`", each) for key, each in rule["annotations"].items()}
    lasts = f", after {rule['for']}" if "for" in rule else ""
    links = ", ".join(f"[{phrase}](#{slug(phrase)})" for phrase in LOGGED.get(rule["alert"], ()))
    return (
        f"\n### {rule['alert']}\n\n{texts['summary']} ({rule['labels']['severity']}{lasts}).\n\n"
        f"{texts['description']}\n" + (f"\nIn the log: {links}.\n" if links else "")
    )


@cache
def alert_rules() -> tuple[Alert, ...]:
    """Return the rules of deploy/monitoring."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return tuple(group["rules"])


def pages() -> Files:
    """Return the page, with today's catalogue and alerts."""
    return {MANUAL: page(MANUAL.read_text(encoding="utf-8"), sources(), alerts=alert_rules())}


def unlike() -> Iterator[str]:
    """Yield a line for each difference between source, catalogue and alerts, which no page shows."""
    yield from faults(sources())
    phrases = {phrase for section in CATALOGUE.values() for phrase in section}
    for alert, logged in LOGGED.items():
        if alert not in {each["alert"] for each in alert_rules()}:
            yield f"LOGGED of tools/messages.py has {alert}, which is no alert"
        yield from (
            f"phrases.py has no {each!r}, which LOGGED has of {alert}" for each in logged if each not in phrases
        )
