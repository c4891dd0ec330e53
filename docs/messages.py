"""The catalogue in docs/messages.md, from the tables of causes and fixes and from what the source logs.

python docs/messages.py [--check]     --check: only tell whether it is up to date and nothing is missing in the tables
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.log_remedies import LOG, SUBJECTS
from nri_gpu.domain.remedies import REFUSALS, REFUSED, VALIDATION, Remedy

PACKAGE: Final = Path(__file__).parents[1] / "nri_gpu"
TABLES: Final = (PACKAGE / "domain" / "remedies.py", PACKAGE / "domain" / "log_remedies.py")
MANUAL: Final = Path(__file__).with_suffix(".md")
FIRST: Final = "## Refusals"  # the catalogue is the end of the page, from here on

CALLS: Final = {"warning": "warning", "note": "warning", "error": "error", "critical": "error", "log": "warning"}
QUIET: Final = ("INFO", "DEBUG")
LASTING: Final = "warning, error if it lasts"  # said by LogOnce, which has a fault beside the phrase
EITHER: Final = "warning or error"
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def sources(package: Path = PACKAGE) -> list[Source]:
    return [Source(file) for file in sorted(package.rglob("*.py")) if "_pb" not in file.parts and file not in TABLES]


def faults(files: Iterable[Source], log: Mapping[str, Remedy] = LOG) -> Iterator[str]:
    """What is wrong between the source and the tables."""
    found: dict[str, str] = {}
    strings: set[str] = set()
    for file in files:
        yield from (f"{place}: the phrase is not fixed: put what varies in a field" for place in file.loose)
        found |= file.found
        strings |= set(file.strings)
    yield from (f"log_remedies.py has no cause and fix of {phrase!r}" for phrase in found if phrase not in log)
    said = "\n".join(strings)
    yield from (f"nothing logs {phrase!r}, which log_remedies.py has" for phrase in log if phrase not in said)


def catalogue(files: Iterable[Source]) -> str:
    """The tables, as Markdown."""
    levels = {phrase: level for file in files for phrase, level in file.found.items()}
    lines = [
        FIRST,
        "",
        "The code stands in brackets in the sentence that `kubectl describe pod` and `crictl` show, and in the field",
        "`CODE` of the log's line.",
        "",
        *_table("code", REFUSALS),
        "Validation (`not-granted`, `ungranted-nodes`) and a start have these sentences:",
        "",
        *_table("words of the sentence", VALIDATION),
        "In the log a refusal is a line at level INFO:",
        "",
        *_table("phrase", REFUSED),
        "## Warnings and errors",
        "",
    ]
    for subject, remedies in SUBJECTS.items():
        lines += [f"### {subject}", "", *_table("phrase", remedies, levels)]
    return "\n".join(lines)


def page(old: str, files: Iterable[Source]) -> str:
    """The page with its catalogue as it has to be."""
    return old.partition(FIRST)[0] + catalogue(files).strip() + "\n"


def _table(first: str, remedies: Mapping[str, Remedy], levels: Mapping[str, str] | None = None) -> Iterator[str]:
    yield f"| {first} |{' level |' if levels else ''} cause | fix |"
    yield f"|---|{'---|' if levels else ''}---|---|"
    for name, (cause, fix) in remedies.items():
        shown = name.replace("`", "")  # Markdown quotes nothing within quotes
        level = f" {levels.get(name, 'warning')} |" if levels else ""
        yield f"| `{shown}` |{level} {cause} | {fix} |"
    yield ""


def main() -> int:
    """Write or check. Returns an exit code."""
    files = sources()
    wrong = list(faults(files))
    old = MANUAL.read_text(encoding="utf-8")
    new = page(old, files)
    if "--check" not in sys.argv[1:]:
        MANUAL.write_text(new, encoding="utf-8")
    elif new != old:
        wrong.append("messages.md is not what nri_gpu/domain/*remedies.py say: run `make schema`")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
