"""Docstrings open as a native writes them: a function's with a verb (ruff, D401), a class's or module's with a noun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[2] / "nri_gpu"
NEVER: Final = (
    *("What", "Why", "How", "Which", "Whose", "Whether", "Who", "Where", "Until", "One", "Of", "With", "Without"),
    *("Those", "These", "All", "It", "They", "The same", "That", "Raises", "Returns"),
)


def openings() -> Iterator[tuple[str, str]]:
    """Each place with a docstring, and the docstring's first line."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())) if "_pb" not in file.parts else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"
                yield place, (ast.get_docstring(node) or "").partition("\n")[0]


def test_no_docstring_opens_with_a_word_that_says_nothing_yet() -> None:
    odd = [f"{place}: {line}" for place, line in openings() if line.startswith(tuple(f"{word} " for word in NEVER))]
    assert not odd, "\n".join(odd)
