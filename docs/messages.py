"""Checks docs/messages.md: a row for all that is refused and that is logged as a warning or an error, and no others.

python docs/messages.py     prints what is missing, too much or otherwise in the source, and returns 1 if anything is
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from nri_gpu.domain.phrases import FIXES

PACKAGE: Final = Path(__file__).parents[1] / "nri_gpu"
TABLE: Final = PACKAGE / "domain" / "fixes.py"
MANUAL: Final = Path(__file__).with_suffix(".md")
# First lines of tables.
CODES: Final = "| code | cause | fix |"
SENTENCES: Final = "| words of the sentence | cause | fix |"
REFUSED: Final = "| phrase | cause | fix |"
LOG: Final = "| phrase | level | cause | fix |"

CALLS: Final = {"warning": "warning", "note": "warning", "error": "error", "critical": "error", "log": "warning"}
QUIET: Final = ("INFO", "DEBUG")
LASTING: Final = "warning, error if it lasts"  # said by LogOnce, which has a fault beside the phrase
EITHER: Final = "warning or error"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Row(NamedTuple):
    """A row of the page. name: a code, a phrase or words. level: of a line of the log; empty for a refusal."""

    table: str
    name: str
    level: str
    cause: str
    fix: str


def rows(text: str) -> Iterator[Row]:
    """Of the page's catalogue. Raises: ValueError: a row has too few cells, or too many."""
    table = ""
    for line in text.splitlines():
        if line in (CODES, SENTENCES, REFUSED, LOG):
            table = line
        elif line.startswith("| `"):
            name, *level, cause, fix = line.strip("| ").split(" | ")
            if len(level) != (table == LOG):
                raise ValueError(f"messages.md: not a row of {table}: {line}")
            yield Row(table, name.strip("`"), "".join(level), cause, fix)


class Source(ast.NodeVisitor):
    """What one file logs. found: phrase -> level. lasting: what LogOnce says. strings: all of its texts.

    loose: where a phrase is not fixed.
    """

    def __init__(self, file: Path) -> None:
        self.found: dict[str, str] = {}
        self.lasting: set[str] = set()
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
                self.lasting |= {text} if level == LASTING else set()

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


def sources(package: Path = PACKAGE) -> list[Source]:
    return [Source(file) for file in sorted(package.rglob("*.py")) if "_pb" not in file.parts and file != TABLE]


def faults(files: Iterable[Source], page: Iterable[Row], fixes: Mapping[str, str] = FIXES) -> Iterator[str]:
    """What is wrong between the source, the rows of the page, and the fixes that are logged."""
    found: dict[str, str] = {}
    strings: set[str] = set()
    lasting: set[str] = set()
    for file in files:
        yield from (f"{place}: the phrase is not fixed: put what varies in a field" for place in file.loose)
        found |= file.found
        strings |= set(file.strings)
        lasting |= file.lasting
    log = [row for row in page if row.table == LOG]
    yield from (
        f"messages.md has {name!r} twice" for name, times in Counter(row.name for row in log).items() if times > 1
    )
    named = {row.name: row for row in log}
    found = {_shown(phrase): level for phrase, level in found.items()}
    yield from (f"messages.md has no cause and fix of {phrase!r}" for phrase in found if phrase not in named)
    said = _shown("\n".join(strings))
    for row in log:
        if row.name not in said:
            yield f"nothing logs {row.name!r}, which messages.md has"
        elif row.level != found.get(row.name, "warning"):
            yield f"messages.md: the level of {row.name!r} is {found.get(row.name, 'warning')!r}"
    yield from (f"fixes.py: {phrase!r} is not what LogOnce says, or lacks" for phrase in lasting ^ set(fixes))
    for phrase, fix in fixes.items():
        if _shown(phrase) in named and named[_shown(phrase)].fix != fix:
            yield f"fixes.py and messages.md differ in the fix of {phrase!r}"


def _shown(phrase: str) -> str:
    """As the page has it: Markdown quotes nothing within quotes."""
    return phrase.replace("`", "")


def main() -> int:
    wrong = list(faults(sources(), rows(MANUAL.read_text(encoding="utf-8"))))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
