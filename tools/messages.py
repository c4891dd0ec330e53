"""Tables of docs/messages.md that tell what is logged, and the check that the catalogue has all of it, and no more."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from nri_gpu.domain.phrases import CATALOGUE
from tools.files import ROOT, Files

Catalogue = Mapping[str, Mapping[str, tuple[str, str]]]
PACKAGE: Final = ROOT / "nri_gpu"
TABLE: Final = PACKAGE / "domain" / "phrases.py"
MANUAL: Final = ROOT / "docs" / "messages.md"
# First lines of tables.
CODES: Final = "| code | cause | fix |"
SENTENCES: Final = "| words of the sentence | cause | fix |"
REFUSED: Final = "| phrase | cause | fix |"
LOG: Final = "| phrase | level | cause | fix |"
MADE: Final = (
    "## Warnings and errors\n\n<!-- Made of nri_gpu/domain/phrases.py: run `make generate`. -->\n"  # to the end
)

QUIET: Final = ("INFO", "DEBUG")
LASTING: Final = "warning, error if it lasts"  # said by LogOnce, which has a fault beside the phrase
CALLS: Final = {
    **{"warning": "warning", "note": "warning", "error": "error", "critical": "error", "log": "warning"},
    "guard": LASTING,
}
EITHER: Final = "warning or error"
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


def page(text: str, files: Iterable[Source], catalogue: Catalogue = CATALOGUE) -> str:
    """The page, with tables of the catalogue below what people wrote; the levels are those of the source."""
    levels = {phrase: level for file in files for phrase, level in file.found.items()}
    tables = [
        f"\n### {section}\n\n{LOG}\n|---|---|---|---|\n"
        # Markdown quotes nothing within quotes.
        + "".join(
            f"| `{phrase.replace('`', '')}` | {levels.get(phrase, 'warning')} | {cause} | {fix} |\n"
            for phrase, (cause, fix) in phrases.items()
        )
        for section, phrases in catalogue.items()
    ]
    return text.partition(MADE)[0] + MADE + "".join(tables)


def pages() -> Files:
    """Return the page, with the tables of today's catalogue."""
    return {MANUAL: page(MANUAL.read_text(encoding="utf-8"), sources())}


def unlike() -> Iterator[str]:
    """Yield a line for each difference between source and catalogue, which no table shows."""
    return faults(sources())
