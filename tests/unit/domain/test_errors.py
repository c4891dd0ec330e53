from __future__ import annotations

import ast
import builtins
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import COMMAND_LINE, Exit, Fault, RequestError, fault_of

FAULTS = {
    "all": (Fault("f", "a.b", "wrong", 3), "f:3: a.b: wrong"),
    "no line": (Fault("f", "a.b", "wrong"), "f: a.b: wrong"),
    "no key": (Fault("f", "", "wrong", 3), "f:3: wrong"),
    "neither": (Fault("f", "", "wrong"), "f: wrong"),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_reads_like_a_compilers(fault: Fault, text: str) -> None:
    assert str(fault) == text


def test_a_request_error_counts_characters_from_one() -> None:
    assert str(RequestError("k", "wrong", 0)) == "k at character 1: wrong"
    assert str(RequestError("k", "wrong")) == "k: wrong"


SAID = {
    "a file that is not there": (
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/f"),
        "/f: no such file",
    ),
    "a folder": (IsADirectoryError(errno.EISDIR, "Is a directory", "/f"), "/f: it is a folder"),
    "another": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "our own clause": (
        PermissionError(errno.EPERM, "its mode 0666 lets others use it", "/k"),
        "/k: its mode 0666 lets others use it",
    ),
    "a sentence alone": (PermissionError("/a is not readable by everyone"), "/a is not readable by everyone"),
    "no word": (TimeoutError(), "TimeoutError"),
    "none of the system": (ValueError("a is no b"), "a is no b"),
    "none, and no word": (ValueError(), "ValueError()"),
}


@pytest.mark.parametrize(("error", "text"), SAID.values(), ids=SAID)
def test_an_error_is_said_without_its_number(error: Exception, text: str) -> None:
    assert fault_of(error) == text


def test_the_code_is_that_of_the_worst_fault() -> None:
    wrong, denied, option = Fault("f", "", "wrong"), Fault("f", "", "no", denied=True), Fault(COMMAND_LINE, "--a", "no")
    assert Exit.of_faults((wrong, option)) == Exit.CONFIGURATION
    assert Exit.of_faults((wrong, denied, option)) == Exit.PERMISSION
    assert Exit.of_faults((option,)) == Exit.USAGE


SYSTEM: Final = {name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, OSError)}
OF_THE_SYSTEM: Final = SYSTEM - {"TimeoutError"}  # asyncio's has our words, or none
PACKAGE: Final = Path(__file__).parents[3] / "nri_gpu"


def raw(handler: ast.ExceptHandler) -> Iterator[ast.expr]:
    """Where a handler of the system's errors prints one as Python does, `[Errno 2] ...`, or its bare strerror."""
    for node in ast.walk(ast.Module(handler.body, [])):
        match node:
            case ast.Call(ast.Name("str"), [ast.Name(handler.name)]) | ast.FormattedValue(ast.Name(handler.name)):
                yield node
            case ast.Attribute(ast.Name(handler.name), "strerror"):
                yield node


def test_no_error_of_the_system_is_printed_as_python_prints_it() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        for handler in ast.walk(ast.parse(file.read_text()))
        if isinstance(handler, ast.ExceptHandler)
        and handler.type
        and handler.name
        and OF_THE_SYSTEM & {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
        for node in raw(handler)
    ]
    assert found == []
